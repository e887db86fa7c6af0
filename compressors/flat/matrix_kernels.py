"""PowerSGD over all matrices of a bucket, as Triton kernels.

A program works on a tile of one matrix, or on one matrix, and adds up in an order that depends on the shape of that
matrix alone: its bits depend on no neighbour, and on no bucket. Products of low rank are bound by memory, so tiles are
multiplied and summed up in registers. The few numbers of a Gram matrix are computed in float64.

`R` is the rank's next power of two, `RANK` the rank.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lowdiff.compressors.flat.kernels import _finite, _pattern, _rounded, _wide, kernel


@triton.jit
def _of(table, row: tl.constexpr, matrix, NUM):
    """One number of a matrix; `lowdiff.compressors.flat.matrices.Matrices` names the rows."""
    return tl.load(table + row * NUM + matrix)


@kernel
def normalise(
    last, drawn, start, table, NUM, RANK: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr
):
    """Make rows of the last Q of length 1; take random ones where they are zero, or not finite."""
    matrix = tl.program_id(0)
    length = _of(table, 3, matrix, NUM)
    kept = last + _of(table, 7, matrix, NUM)
    at = _of(table, 5, matrix, NUM)
    rank = tl.arange(0, R)
    squares = tl.zeros([R], tl.float32)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < length)[None, :]
        place = rank[:, None] * length + column[None, :]
        value = tl.load(kept + place, inside, other=0.0)
        squares += tl.sum(value * value, 1)
    norm = tl.sqrt_rn(squares)
    is_usable = (norm > 0.0) & (norm < float("inf"))
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < length)[None, :]
        place = rank[:, None] * length + column[None, :]
        value = tl.load(kept + place, inside, other=0.0)
        other = tl.load(drawn + at + place, inside, other=0.0)
        by = tl.where(is_usable, norm, 1.0)
        unit = tl.div_rn(value, tl.broadcast_to(by[:, None], [R, COLUMNS]))
        tl.store(start + at + place, tl.where(is_usable[:, None], unit, other), inside)


@kernel
def project(
    bucket, source, target, scale, start, left, used, table, NUM, tiles, NUM_TILES,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write gradient plus residual, and its product with Q."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    row = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, ROWS)
    height = _of(table, 2, matrix, NUM)
    width = _of(table, 3, matrix, NUM)
    here = bucket + _of(table, 0, matrix, NUM)
    there = _of(table, 1, matrix, NUM)
    units = start + _of(table, 5, matrix, NUM)
    rank = tl.arange(0, R)
    by = tl.load(scale)
    sums = tl.zeros([ROWS, R], tl.float32)
    is_used = tl.zeros([ROWS], tl.int32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        gradient = tl.load(here + place, inside, other=0.0)
        owed = tl.load(source + there + place, inside, other=0.0)
        scaled = _rounded(_wide(owed) * by, owed.dtype)
        total = _rounded(_wide(scaled) + _wide(gradient), owed.dtype)
        tl.store(target + there + place, total, inside)
        among = (rank < RANK)[:, None] & (column < width)[None, :]
        unit = tl.load(units + rank[:, None] * width + column[None, :], among, other=0.0)
        sums += tl.sum(_wide(total)[:, None, :] * unit[None, :, :], 2)
        is_used |= tl.max((_wide(gradient) != 0.0).to(tl.int32), 1)
    out = left + _of(table, 4, matrix, NUM) + rank[None, :] * height + row[:, None]
    tl.store(out, sums, (row < height)[:, None] & (rank < RANK)[None, :])
    tl.atomic_or(used + matrix, tl.max(is_used, 0))


@kernel
def drop(
    left, used, table, NUM, tiles, NUM_TILES,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Send zeros of a matrix whose gradient is all zeros: DDP drops the average of what no rank used."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    row = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, ROWS)
    height = _of(table, 2, matrix, NUM)
    rank = tl.arange(0, R)
    place = left + _of(table, 4, matrix, NUM) + rank[None, :] * height + row[:, None]
    inside = (row < height)[:, None] & (rank < RANK)[None, :]
    is_unused = tl.load(used + matrix) == 0
    tl.store(place, tl.zeros([ROWS, R], tl.float32), inside & is_unused)


@kernel
def orthogonalise(
    left, factors, table, NUM, RANK: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr
):
    """Make the rows of P orthonormal, in order; what depends on those before it becomes zero.

    Gram-Schmidt, twice repeated, on the coefficients of the rows: what it needs of them is their Gram matrix.
    """
    matrix = tl.program_id(0)
    length = _of(table, 2, matrix, NUM)
    rows = left + _of(table, 4, matrix, NUM)
    out = factors + _of(table, 6, matrix, NUM)
    rank = tl.arange(0, R)
    products = tl.zeros([R, R, COLUMNS], tl.float64)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < length)[None, :]
        value = tl.load(rows + rank[:, None] * length + column[None, :], inside, other=0.0)
        value = value.to(tl.float64)
        products += value[:, None, :] * value[None, :, :]
    gram = tl.sum(products, 2)
    made = tl.zeros([R, R], tl.float64)
    for k in tl.static_range(RANK):
        own = (rank == k).to(tl.float64)
        before = tl.sqrt(tl.sum(own * tl.sum(gram * own[None, :], 1), 0))
        for _ in tl.static_range(2):
            along = tl.sum(made * tl.sum(gram * own[None, :], 1)[None, :], 1)
            own = own - tl.sum(made * along[:, None], 0)
        square = tl.sum(own * tl.sum(gram * own[None, :], 1), 0)
        norm = tl.sqrt(tl.where(square < 0.0, 0.0, square))
        # The remainder of a dependent row is rounding error and has no direction.
        is_lost = norm <= before * (16 * 1.1920928955078125e-07)
        own = tl.where(is_lost, tl.zeros_like(own), own / tl.where(is_lost, 1.0, norm))
        made = tl.where(rank[:, None] == k, tl.broadcast_to(own[None, :], [R, R]), made)
    for begin in range(0, length, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < length)[None, :]
        place = rank[:, None] * length + column[None, :]
        value = tl.load(rows + place, inside, other=0.0).to(tl.float64)
        unit = tl.sum(made[:, :, None] * value[None, :, :], 1)
        tl.store(out + place, unit.to(tl.float32), inside)


@kernel
def back(
    target, factors, used, parts, table, NUM, tiles, NUM_TILES,
    RANK: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Multiply P with a range of a matrix's rows; where this rank did not use it, with zeros."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    column = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, COLUMNS)
    number = tl.load(tiles + 2 * NUM_TILES + tile)
    height = _of(table, 2, matrix, NUM)
    width = _of(table, 3, matrix, NUM)
    there = target + _of(table, 1, matrix, NUM)
    units = factors + _of(table, 6, matrix, NUM)
    rank = tl.arange(0, R)
    sums = tl.zeros([R, COLUMNS], tl.float32)
    first = number * SPLIT
    is_used = tl.load(used + matrix) != 0
    for begin in range(first, tl.minimum(first + SPLIT, height), ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < height)[:, None] & (column < width)[None, :] & is_used
        total = tl.load(there + row[:, None] * width + column[None, :], inside, other=0.0)
        among = (rank < RANK)[:, None] & (row < height)[None, :]
        unit = tl.load(units + rank[:, None] * height + row[None, :], among, other=0.0)
        sums += tl.sum(unit[:, :, None] * _wide(total)[None, :, :], 1)
    out = parts + _of(table, 8, matrix, NUM) + number * RANK * width
    place = rank[:, None] * width + column[None, :]
    tl.store(out + place, sums, (rank < RANK)[:, None] & (column < width)[None, :])


@kernel
def join(
    parts, right, table, NUM, tiles, NUM_TILES,
    RANK: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of all ranges of rows, in order."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    column = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, COLUMNS)
    width = _of(table, 3, matrix, NUM)
    rank = tl.arange(0, R)
    inside = (rank < RANK)[:, None] & (column < width)[None, :]
    place = rank[:, None] * width + column[None, :]
    sums = tl.zeros([R, COLUMNS], tl.float32)
    own = parts + _of(table, 8, matrix, NUM)
    for number in range(_of(table, 9, matrix, NUM)):
        sums += tl.load(own + number * RANK * width + place, inside, other=0.0)
    tl.store(right + _of(table, 5, matrix, NUM) + place, sums, inside)


@kernel
def keep(
    right, last, target, factors, table, NUM,
    RANK: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keep Q: behind P, and for the next step's start, where rows that are zero stay as they were."""
    matrix = tl.program_id(0)
    height = _of(table, 2, matrix, NUM)
    width = _of(table, 3, matrix, NUM)
    own = right + _of(table, 5, matrix, NUM)
    out = factors + _of(table, 6, matrix, NUM) + RANK * height
    kept = _of(table, 7, matrix, NUM)
    rank = tl.arange(0, R)
    is_there = tl.zeros([R], tl.int32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < width)[None, :]
        value = tl.load(own + rank[:, None] * width + column[None, :], inside, other=0.0)
        is_there |= tl.max((value != 0.0).to(tl.int32), 1)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (rank < RANK)[:, None] & (column < width)[None, :]
        place = rank[:, None] * width + column[None, :]
        value = tl.load(own + place, inside, other=0.0)
        earlier = tl.load(last + kept + place, inside, other=0.0)
        tl.store(out + place, value, inside)
        tl.store(target + kept + place, tl.where((is_there != 0)[:, None], value, earlier), inside)


@triton.jit
def _low_rank(
    left, row, height, column, width, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Multiply P, behind which lies Q, with Q: a tile in float32.

    Terms in their order, each added with one rounding, as PyTorch's `addcmul_` does.
    """
    right = left + RANK * height
    p = tl.load(left + row, row < height, other=0.0)
    q = tl.load(right + column, column < width, other=0.0)
    made = p[:, None] * q[None, :]
    for k in tl.static_range(1, RANK):
        p = tl.load(left + k * height + row, row < height, other=0.0)
        q = tl.load(right + k * width + column, column < width, other=0.0)
        p = tl.broadcast_to(p[:, None], [ROWS, COLUMNS])
        made = tl.fma(p, tl.broadcast_to(q[None, :], [ROWS, COLUMNS]), made)
    return made


@kernel
def update(
    bucket, target, scale, factors, table, NUM, tiles, NUM_TILES,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the average gradient, and what of the total it is not."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    row = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, ROWS)
    height = _of(table, 2, matrix, NUM)
    width = _of(table, 3, matrix, NUM)
    here = bucket + _of(table, 0, matrix, NUM)
    there = target + _of(table, 1, matrix, NUM)
    left = factors + _of(table, 6, matrix, NUM)
    by = tl.load(scale)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < height)[:, None] & (column < width)[None, :]
        made = _low_rank(left, row, height, column, width, RANK, ROWS, COLUMNS)
        gradient = _rounded(made, bucket.dtype.element_ty)
        place = row[:, None] * width + column[None, :]
        tl.store(here + place, gradient, inside)
        total = tl.load(there + place, inside, other=0.0)
        owed = _rounded(_wide(total) - _wide(gradient), total.dtype)
        divided = tl.div_rn(_wide(owed), tl.broadcast_to(by, [ROWS, COLUMNS]))
        tl.store(there + place, _finite(_rounded(divided, total.dtype)), inside)


@kernel
def compare(
    addresses, factors, by, COUNT, differs, table, NUM, tiles, NUM_TILES,
    KIND: tl.constexpr, PATTERN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tell which gradients are not P Q^T with the bits of `update`, multiplied by some numbers in turn."""
    tile = tl.program_id(0)
    matrix = tl.load(tiles + tile)
    row = tl.load(tiles + NUM_TILES + tile) + tl.arange(0, ROWS)
    height = _of(table, 2, matrix, NUM)
    width = _of(table, 3, matrix, NUM)
    address = tl.load(addresses + matrix)
    left = factors + _of(table, 6, matrix, NUM)
    found = tl.zeros([ROWS], tl.int32)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        place = row[:, None] * width + column[None, :]
        inside = (row < height)[:, None] & (column < width)[None, :] & (address != 0)
        made = _low_rank(left, row, height, column, width, RANK, ROWS, COLUMNS)
        gradient = _rounded(made, KIND)
        for number in range(COUNT):
            gradient = _rounded(_wide(gradient) * tl.load(by + number), KIND)
        consumed = tl.load(address.to(tl.pointer_type(PATTERN)) + place, inside, other=0)
        is_odd = inside & (gradient.to(PATTERN, bitcast=True) != consumed)
        # The bits of a NaN may depend on its place in a block.
        is_odd |= inside & (_pattern(_wide(gradient)) >= 0x7F800000)
        found |= tl.max(is_odd.to(tl.int32), 1)
    tl.atomic_or(differs + matrix, tl.max(found, 0))


@kernel
def expand(factors, out, first, count, height, width, RANK: tl.constexpr, ELEMENTS: tl.constexpr):
    """Write a range of P Q^T, in row order, with the bits of `update`."""
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = index < count
    element = first + index
    row = element // width
    column = element % width
    right = factors + RANK * height
    p = tl.load(factors + row, inside, other=0.0)
    made = p * tl.load(right + column, inside, other=0.0)
    for k in tl.static_range(1, RANK):
        step = tl.zeros_like(row) + k  # of 64 bits
        p = tl.load(factors + step * height + row, inside, other=0.0)
        made = tl.fma(p, tl.load(right + step * width + column, inside, other=0.0), made)
    tl.store(out + index, _rounded(made, out.dtype.element_ty), inside)
