"""Encode a differential's scalars, and decode a stored record into a differential."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from lowdiff.errors import DamagedFile
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import StoredRecord
from lowdiff.persistence.format.sections import read_sections
from lowdiff.persistence.format.values import BadEncoding, decode, encode
from lowdiff.types import (
    AverageStep,
    Bits,
    Differential,
    EarlierStep,
    OptimizerStep,
    Payload,
    ResidualMark,
    Section,
    Written,
)

#: Prefix of sections that are not the payload's: ``written/before/INDEX``, ``written/after/INDEX``
#: and ``written/average/INDEX/NAME``.
_WRITTEN = "written/"
#: Layout indices and checksums. Runs of before these were taken have no such key.
_STATE_DIGESTS = "state_digests"
#: Bytes of a checksum of a parameter or average. There is no such key where four suffice.
_DIGEST_BYTES = "digest_bytes"
#: Prefix of sections of a loop body's optimizer steps after the first.
_LATER_STEP = "step/"


def encode_scalars(differential: Differential) -> bytes:
    """Encode everything but the payload, as the meta part of a record."""
    residual = differential.residual
    checksums = [*differential.digests]
    for average in differential.averages.values():
        checksums += average.digests
    width = 8 if max(checksums, default=0) >> 32 else 4
    scalars: dict[str, Any] = {
        "steps": [_step_part(step, width) for step in differential.steps],
        "held": _numbers(differential.held),
        "items": dict(differential.items),
        "residual": residual and [residual.slot, residual.generation],
        "digests": _numbers(differential.digests, width),
    }
    if width != 4:
        scalars[_DIGEST_BYTES] = width
    if differential.state_digests:
        pairs = sorted(differential.state_digests.items())
        scalars[_STATE_DIGESTS] = [_numbers(numbers) for numbers in zip(*pairs, strict=True)]
    return encode(scalars)


def sections_of(differential: Differential) -> tuple[Section, ...]:
    """Return the sections of a differential: the payload, and values that something else wrote."""
    return tuple(
        section
        for number, step in enumerate(differential.steps)
        for section in numbered((*step.payload.sections, *written_sections(step.written)), number)
    )


def numbered(sections: tuple[Section, ...], number: int) -> tuple[Section, ...]:
    """Name sections as those of one optimizer step of a loop body, counted from 0."""
    prefix = f"{_LATER_STEP}{number}/"
    return tuple(replace(s, name=prefix + s.name) for s in sections) if number else sections


def _by_step(sections: Sequence[Section], num_steps: int) -> list[list[Section]]:
    """Undo `numbered`: return the sections of each optimizer step.

    Raises:
        ValueError: If a section belongs to none of the steps.
    """
    found: list[list[Section]] = [[] for _ in range(num_steps)]
    for section in sections:
        number, name = 0, section.name
        if name.startswith(_LATER_STEP):
            digits, _, name = name.removeprefix(_LATER_STEP).partition("/")
            number = int(digits)
        if not 0 <= number < num_steps:
            raise ValueError(f"section {section.name!r} is of none of {num_steps} steps")
        found[number].append(replace(section, name=name))
    return found


def written_sections(written: Written) -> tuple[Section, ...]:
    """Return the sections with values that something else than an optimizer wrote."""
    named = {
        **{f"before/{i}": values for i, values in written.before.items()},
        **{f"after/{i}": values for i, values in written.after.items()},
        **{
            f"average/{i}/{name}": values
            for name, of_average in written.averages.items()
            for i, values in of_average.items()
        },
    }
    return tuple(Section(_WRITTEN + name, "planes", values) for name, values in named.items())


def read_differential(stored: StoredRecord, codec: Codec) -> Differential:
    """Decode a stored record.

    Raises:
        DamagedFile: If the checksummed bytes are not a differential, or if a live trainer has
            reused their staging memory.
    """
    header = stored.record.header
    record = stored.record
    if stored.may_change:
        record = replace(record, body=memoryview(bytes(record.body)))
        if not record.is_intact():
            raise DamagedFile(stored.path, f"step {header.step} was overwritten by its trainer")
    try:
        scalars = decode(codec.expand(record.meta) if header.meta_coded else bytes(record.meta))
        sections = read_sections(record.sections, codec, coded=header.coded)
        width = scalars.get(_DIGEST_BYTES, 4)
        *earlier, last = _read_steps(scalars["steps"], sections, width)
        return Differential(
            step=header.step,
            incarnation=header.incarnation,
            rank=header.rank,
            world_size=header.world_size,
            optimizers=last.optimizers,
            absent=last.absent,
            held=_tuple_of(scalars["held"]),
            payload=last.payload,
            items=scalars["items"],
            residual=scalars["residual"] and ResidualMark(*scalars["residual"]),
            digests=_tuple_of(scalars["digests"], width),
            state_digests=_pairs_of(scalars.get(_STATE_DIGESTS, (b"", b""))),
            averages=last.averages,
            written=last.written,
            earlier=tuple(earlier),
        )
    except (BadEncoding, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(
            stored.path, f"step {header.step} is no differential ({error})"
        ) from error


def _step_part(step: EarlierStep | Differential, width: int) -> dict[str, Any]:
    return {
        "optimizers": [
            [o.stepped, o.consumed, o.committed, o.grad_scale, o.found_inf] for o in step.optimizers
        ],
        "absent": _numbers(step.absent),
        "averages": {
            name: [a.updated, a.function, a.decay, a.count, _numbers(a.digests, width)]
            for name, a in step.averages.items()
        },
    }


def _read_steps(
    parts: Sequence[dict[str, Any]], sections: Sequence[Section], width: int
) -> list[EarlierStep]:
    """Return all optimizer steps of a loop body, including the last one.

    Raises:
        ValueError: If there is no step, or a section belongs to no step.
    """
    if not parts:
        raise ValueError("it has no optimizer step")
    return [
        EarlierStep(
            optimizers=tuple(OptimizerStep(*o) for o in part["optimizers"]),
            absent=_tuple_of(part["absent"]),
            payload=Payload(tuple(s for s in own if not s.name.startswith(_WRITTEN))),
            averages={
                name: AverageStep(updated, function, decay, count, _tuple_of(digests, width))
                for name, (updated, function, decay, count, digests) in part["averages"].items()
            },
            written=_written(own),
        )
        for part, own in zip(parts, _by_step(sections, len(parts)), strict=True)
    ]


def _written(sections: Sequence[Section]) -> Written:
    """Undo `written_sections`.

    Raises:
        ValueError: If a section names no parameter.
    """
    before: dict[int, Bits] = {}
    after: dict[int, Bits] = {}
    averages: dict[str, dict[int, Bits]] = {}
    for section in sections:
        if not section.name.startswith(_WRITTEN):
            continue
        side, index, *name = section.name.removeprefix(_WRITTEN).split("/", 2)
        if side == "average" and name:
            averages.setdefault(name[0], {})[int(index)] = section.data
        else:
            {"before": before, "after": after}[side][int(index)] = section.data
    return Written(before, after, averages)


def _numbers(numbers: Sequence[int], width: int = 4) -> bytes:
    """Encode numbers, little-endian and unsigned, in so many bytes each."""
    return np.array(numbers, dtype=f"<u{width}").tobytes()


def _tuple_of(data: bytes, width: int = 4) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype={4: "<u4", 8: "<u8"}[width]).tolist())


def _pairs_of(data: Sequence[bytes]) -> dict[int, int]:
    """Decode indices, strictly ascending, and their checksums.

    Raises:
        ValueError: If they are not that.
    """
    indices, checksums = map(_tuple_of, data)
    if any(before >= after for before, after in pairwise(indices)):
        raise ValueError("its checksums of optimizer state are in no order")
    return dict(zip(indices, checksums, strict=True))
