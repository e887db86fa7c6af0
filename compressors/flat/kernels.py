"""Top-k with error feedback over a whole bucket, as Triton kernels: exact, and the same bits on every device.

A *block* is a range of one parameter's elements; a program works on one block, or on one parameter. Digits of the
magnitude's pattern (31 bits: 9, which are the exponent and one more, 11 and 11) are counted per parameter, the digit of
the k-th largest is found, and the next one is counted among those that share it. To count costs instructions for each
possible digit, so the first has few. What may be selected is a few elements of a block: they are put into a *room* of
fixed size when the first digit is known, and later kernels read that alone. A block with more candidates than its room
holds is read whole again.

Integers are added by atomics, whose order does not matter. Places are never given by atomics: a block counts what it
selects, these counts are summed up in order, and so entries come out in the order of their index.
"""

# mypy: ignore-errors

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

#: Every place is read from a table: to specialise for numbers and addresses would make no load wider, and compile kernels
#: anew, in a backward pass, where a bucket has other ones.
kernel = partial(
    triton.jit,
    do_not_specialize=[
        "NUM_BLOCKS",
        "NUM_SEGMENTS",
        "NUM",
        "NUM_TILES",
        "COUNT",
        "STRIDE",
        "SPAN",
        "first",
        "count",
        "height",
        "width",
    ],
    do_not_specialize_on_alignment=[
        "bucket",
        "source",
        "target",
        "scale",
        "size",
        "state",
        "counts",
        "positions",
        "values",
        "table",
        "rooms",
        "totals",
        "sizes",
        "above",
        "equal",
        "last",
        "drawn",
        "start",
        "left",
        "right",
        "used",
        "tiles",
        "factors",
        "parts",
        "out",
        "addresses",
        "patterns",
        "strange",
        "by",
        "differs",
    ],
)


@triton.jit
def _pattern(total):
    """Magnitude as 31 bits that order as magnitudes do, all NaN alike above infinity."""
    if total.dtype.primitive_bitwidth == 16:
        bits = total.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = total.to(tl.int32, bitcast=True)
    bits = bits & 0x7FFFFFFF
    return tl.where(bits > 0x7F800000, 0x7FFFFFFF, bits)


@triton.jit
def _wide(value):
    """A number as float32; by hand for bfloat16, of which Triton's interpreter reads denormal ones wrongly."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _rounded(value, KIND: tl.constexpr):
    """A float32 as another dtype, to the nearest, ties to even.

    By hand for bfloat16, which Triton's interpreter cuts off.
    """
    if KIND == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
        near = tl.where(is_number, near, 0x7FC0)
        return near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(KIND)


@triton.jit
def _finite(value):
    """The value, or 0 in place of NaN and infinity (R7 of the design: they would stay in the residual for ever)."""
    return tl.where(_pattern(value) >= 0x7F800000, tl.zeros_like(value), value)


@triton.jit
def _block(table, block, NUM_BLOCKS, NUM_SEGMENTS):
    """What the table says of a block: its parameter and first element there, where that lies in bucket and residual.

    Returns:
        Parameter, first element, place in the bucket, the parameter's length, place in the residual, and whether all
        of the parameter is sent.
    """
    segment = tl.load(table + block)
    first = tl.load(table + NUM_BLOCKS + block)
    segments = table + 2 * NUM_BLOCKS
    start = tl.load(segments + segment) + first
    length = tl.load(segments + NUM_SEGMENTS + segment)
    there = tl.load(segments + 2 * NUM_SEGMENTS + segment) + first
    is_whole = tl.load(segments + 3 * NUM_SEGMENTS + segment) == length
    return segment, first, start, length, there, is_whole


@kernel
def add_up(
    bucket, source, target, scale, size, state, counts, positions, values, table,
    NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Write gradient plus residual, count first digits, and clear the bucket; give parameters that are sent whole."""
    block = tl.program_id(0)
    segment, first, start, length, there, is_whole = _block(table, block, NUM_BLOCKS, NUM_SEGMENTS)
    out = tl.load(table + 2 * NUM_BLOCKS + 4 * NUM_SEGMENTS + segment) + first
    by = tl.load(scale)
    found = tl.zeros([1 << BITS], tl.int32)
    used = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, BLOCK, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        inside = first + place < length
        sent = inside & is_whole
        left = inside & (is_whole == 0)
        gradient = tl.load(bucket + start + place, inside, other=0.0)
        tl.store(positions + out + place, (start + place).to(tl.int32), sent)
        averaged = tl.div_rn(_wide(gradient), tl.load(size) + tl.zeros([CHUNK], tl.float32))
        tl.store(values + out + place, _rounded(averaged, gradient.dtype), sent)
        owed = tl.load(source + there + place, left, other=0.0)
        scaled = _rounded(_wide(owed) * by, owed.dtype)
        total = _rounded(_wide(scaled) + _wide(gradient), owed.dtype)
        tl.store(target + there + place, total, left)
        tl.store(bucket + start + place, tl.zeros_like(gradient), inside)
        found += tl.histogram(_pattern(total) >> SHIFT, 1 << BITS, left)
        used |= (_wide(gradient) != 0.0).to(tl.int32)
    digits = tl.arange(0, 1 << BITS)
    tl.atomic_add(counts + segment * WIDTH + digits, found, found > 0)
    tl.atomic_or(state + 2 * NUM_SEGMENTS + segment, tl.max(used, 0))


@kernel
def find(counts, state, NUM_SEGMENTS, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Find the next digit of each parameter's k-th largest, and clear its counts."""
    segment = tl.program_id(0)
    digits = tl.arange(0, 1 << BITS)
    place = counts + segment * WIDTH + ((1 << BITS) - 1 - digits)
    found = tl.load(place)
    tl.store(place, tl.zeros_like(found))
    wanted = tl.load(state + segment)
    before = tl.load(state + NUM_SEGMENTS + segment)
    is_above = tl.cumsum(found, 0) < wanted
    above = tl.sum(tl.where(is_above, found, 0), 0)
    digit = (1 << BITS) - 1 - tl.sum(is_above.to(tl.int32), 0)
    tl.store(state + segment, wanted - above)
    tl.store(state + NUM_SEGMENTS + segment, (before << BITS) | digit)


@kernel
def gather(
    target, state, rooms, totals, sizes, table,
    NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Put what may be selected into its block's room.

    NaN and infinity are always among it, because the residual must not keep them.
    """
    block = tl.program_id(0)
    segment, first, _start, length, there, is_whole = _block(table, block, NUM_BLOCKS, NUM_SEGMENTS)
    digit = tl.load(state + NUM_SEGMENTS + segment)
    lowest = tl.minimum(digit, 0x7F800000 >> SHIFT)
    room = block.to(tl.int64) * ROOM
    size = 0
    for begin in range(0, BLOCK, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        inside = (first + place < length) & (is_whole == 0)
        total = tl.load(target + there + place, inside, other=0.0)
        is_kept = inside & ((_pattern(total) >> SHIFT) >= lowest)
        rank = size + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        fits = is_kept & (rank < ROOM)
        tl.store(rooms + room + rank, place, fits)
        tl.store(totals + room + rank, total, fits)
        size += tl.sum(is_kept.to(tl.int32), 0)
    tl.store(sizes + block, size)


@triton.jit
def _candidates(
    target, rooms, totals, room, there, begin, size, count, CHUNK: tl.constexpr, ROOM: tl.constexpr
):
    """Places and totals of a block's candidates from one on, out of its room, or of all elements if it overflowed."""
    index = begin + tl.arange(0, CHUNK)
    inside = index < count
    is_roomy = size <= ROOM
    place = tl.load(rooms + room + index, inside & is_roomy, other=0)
    place = tl.where(is_roomy, place, index)
    kept = tl.load(totals + room + index, inside & is_roomy, other=0.0)
    read = tl.load(target + there + index, inside & (is_roomy == 0), other=0.0)
    return inside, place, tl.where(is_roomy, kept, read)


@triton.jit
def _count_of(size, length, first, is_whole, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """How many candidates a block has to look through."""
    left = tl.where(is_whole, 0, tl.minimum(length - first, BLOCK)).to(tl.int32)
    return tl.where(size <= ROOM, size, left)


@kernel
def count(
    target, state, counts, rooms, totals, sizes, table,
    NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr, WIDTH: tl.constexpr,
    SHIFT: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Count the next digit of what shares the ones that are found."""
    block = tl.program_id(0)
    segment, first, _start, length, there, is_whole = _block(table, block, NUM_BLOCKS, NUM_SEGMENTS)
    size = tl.load(sizes + block)
    count = _count_of(size, length, first, is_whole, BLOCK, ROOM)
    prefix = tl.load(state + NUM_SEGMENTS + segment)
    found = tl.zeros([1 << BITS], tl.int32)
    for begin in range(0, count, CHUNK):
        inside, _, total = _candidates(
            target, rooms, totals, block.to(tl.int64) * ROOM, there, begin, size, count, CHUNK, ROOM
        )
        pattern = _pattern(total)
        digit = (pattern >> SHIFT) & ((1 << BITS) - 1)
        found += tl.histogram(digit, 1 << BITS, inside & ((pattern >> (SHIFT + BITS)) == prefix))
    digits = tl.arange(0, 1 << BITS)
    tl.atomic_add(counts + segment * WIDTH + digits, found, found > 0)


@kernel
def tally(
    target, state, rooms, totals, sizes, above, equal, table,
    NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Count, per block, what is above the k-th largest, and what is equal to it."""
    block = tl.program_id(0)
    segment, first, _start, length, there, is_whole = _block(table, block, NUM_BLOCKS, NUM_SEGMENTS)
    size = tl.load(sizes + block)
    count = _count_of(size, length, first, is_whole, BLOCK, ROOM)
    threshold = tl.load(state + NUM_SEGMENTS + segment)
    num_above = 0
    num_equal = 0
    for begin in range(0, count, CHUNK):
        inside, _, total = _candidates(
            target, rooms, totals, block.to(tl.int64) * ROOM, there, begin, size, count, CHUNK, ROOM
        )
        pattern = _pattern(total)
        num_above += tl.sum((inside & (pattern > threshold)).to(tl.int32), 0)
        num_equal += tl.sum((inside & (pattern == threshold)).to(tl.int32), 0)
    tl.store(above + block, num_above)
    tl.store(equal + block, num_equal)


@kernel
def place(state, above, equal, table, NUM_BLOCKS, NUM_SEGMENTS, CHUNK: tl.constexpr):
    """Turn the counts of each parameter's blocks into the place of its first entry and the rank of its first tie."""
    segment = tl.program_id(0)
    segments = table + 2 * NUM_BLOCKS
    num_entries = tl.load(segments + 4 * NUM_SEGMENTS + segment).to(tl.int32)
    begin = tl.load(segments + 5 * NUM_SEGMENTS + segment).to(tl.int32)
    end = begin + tl.load(segments + 6 * NUM_SEGMENTS + segment).to(tl.int32)
    wanted = tl.load(state + segment)
    num_equal = 0
    for chunk in range(begin, end, CHUNK):
        block = chunk + tl.arange(0, CHUNK)
        inside = block < end
        over = tl.load(above + block, inside, other=0)
        ties = tl.load(equal + block, inside, other=0)
        earlier = num_equal + tl.cumsum(ties, 0) - ties
        taken = over + tl.minimum(tl.maximum(wanted - earlier, 0), ties)
        tl.store(above + block, num_entries + tl.cumsum(taken, 0) - taken, inside)
        tl.store(equal + block, earlier, inside)
        num_entries += tl.sum(taken, 0)
        num_equal += tl.sum(ties, 0)


@kernel
def write(
    target, size, state, rooms, totals, sizes, above, equal, positions, values, table,
    NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Write a block's entries in the order of their index, and what the residual keeps of them.

    Of a parameter whose gradient is all zeros zeros are sent, and the residual waits: DDP drops the average of a
    parameter that no rank used.
    """
    block = tl.program_id(0)
    segment, first, start, length, there, is_whole = _block(table, block, NUM_BLOCKS, NUM_SEGMENTS)
    filled = tl.load(sizes + block)
    count = _count_of(filled, length, first, is_whole, BLOCK, ROOM)
    wanted = tl.load(state + segment)
    threshold = tl.load(state + NUM_SEGMENTS + segment)
    is_used = tl.load(state + 2 * NUM_SEGMENTS + segment) != 0
    out = tl.load(above + block)
    num_equal = tl.load(equal + block)
    for begin in range(0, count, CHUNK):
        inside, place, total = _candidates(
            target,
            rooms,
            totals,
            block.to(tl.int64) * ROOM,
            there,
            begin,
            filled,
            count,
            CHUNK,
            ROOM,
        )
        pattern = _pattern(total)
        is_tie = (inside & (pattern == threshold)).to(tl.int32)
        rank = num_equal + tl.cumsum(is_tie, 0) - is_tie
        is_sent = inside & ((pattern > threshold) | ((pattern == threshold) & (rank < wanted)))
        sent = is_sent.to(tl.int32)
        entry = out + tl.cumsum(sent, 0) - sent
        value = tl.where(is_used, total, tl.zeros_like(total))
        value = _rounded(_wide(value), values.dtype.element_ty)
        tl.store(positions + entry, (start + place).to(tl.int32), is_sent)
        averaged = tl.div_rn(_wide(value), tl.load(size) + tl.zeros([CHUNK], tl.float32))
        tl.store(values + entry, _rounded(averaged, values.dtype.element_ty), is_sent)
        left = _rounded(_wide(total) - _wide(value), total.dtype)
        left = _finite(tl.where(is_sent, left, total))
        is_infinite = inside & (pattern >= 0x7F800000)
        tl.store(target + there + place, left, is_sent | is_infinite)
        out += tl.sum(sent, 0)
        num_equal += tl.sum(is_tie, 0)


@kernel
def unscale(
    target, scale, table, NUM_BLOCKS, NUM_SEGMENTS, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """Take the loss scale out of the residual again; nothing to do without one."""
    by = tl.load(scale)
    block = tl.program_id(0)
    _segment, first, _start, length, there, is_whole = _block(
        table, block, NUM_BLOCKS, NUM_SEGMENTS
    )
    left = tl.where(is_whole | (by == 1.0), 0, tl.minimum(length - first, BLOCK)).to(tl.int32)
    for begin in range(0, left, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        inside = place < left
        total = tl.load(target + there + place, inside, other=0.0)
        divided = _rounded(tl.div_rn(_wide(total), by), total.dtype)
        tl.store(target + there + place, _finite(divided), inside)
