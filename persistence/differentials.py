"""A differential's scalars as bytes, and a stored record as a differential."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np

from lowdiff.errors import DamagedFile
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.forms import BadEncoding
from lowdiff.persistence.records import StoredRecord
from lowdiff.persistence.sections import read_sections
from lowdiff.persistence.values import decode, encode
from lowdiff.types import (
    AverageStep,
    Differential,
    Digest,
    OptimizerStep,
    Payload,
    ResidualMark,
)


def encode_scalars(differential: Differential) -> bytes:
    """Everything but the payload, as the meta part of a record."""
    residual, digest = differential.residual, differential.digest
    scalars: dict[str, Any] = {
        "optimizers": [_optimizer_part(o) for o in differential.optimizers],
        "absent": _bitmap(differential.absent),
        "held": _bitmap(differential.held),
        "items": dict(differential.items),
        "residual": residual and [residual.slot, residual.generation],
        "digest": digest and [digest.start, digest.stop, digest.value],
    }
    if differential.averages:
        scalars["averages"] = {n: list(astuple(a)) for n, a in differential.averages.items()}
    return encode(scalars)


def read_differential(stored: StoredRecord, codec: Codec) -> Differential:
    """Decode a stored record.

    Raises:
        DamagedFile: If the checksummed bytes are still not a differential, or if a live trainer
            has reused the staging memory they were in.
    """
    header = stored.record.header
    record = stored.record
    if stored.staged:
        record = replace(record, body=memoryview(bytes(record.body)))
        if not record.is_intact():
            raise DamagedFile(stored.path, f"step {header.step} was overwritten by its trainer")
    try:
        scalars = decode(codec.expand(record.meta) if header.meta_coded else bytes(record.meta))
        sections = read_sections(record.sections, codec, coded=header.coded)
        return Differential(
            step=header.step,
            incarnation=header.incarnation,
            rank=header.rank,
            world_size=header.world_size,
            optimizers=tuple(_optimizer_step(*o) for o in scalars["optimizers"]),
            absent=_indices(scalars["absent"]),
            held=_indices(scalars["held"]),
            payload=Payload(sections),
            items=scalars["items"],
            residual=scalars["residual"] and ResidualMark(*scalars["residual"]),
            digest=scalars["digest"] and Digest(*scalars["digest"]),
            averages={name: AverageStep(*a) for name, a in scalars.get("averages", {}).items()},
        )
    except (BadEncoding, KeyError, TypeError) as error:
        raise DamagedFile(
            stored.path, f"step {header.step} is no differential ({error})"
        ) from error


def _bitmap(indices: tuple[int, ...]) -> bytes:
    """Bit ``i % 8`` of byte ``i // 8`` is set for every index ``i``."""
    flags = np.zeros(max(indices, default=-1) + 1, np.uint8)
    flags[list(indices)] = 1
    return np.packbits(flags, bitorder="little").tobytes()


def _indices(bitmap: bytes) -> tuple[int, ...]:
    flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    return tuple(int(i) for i in np.flatnonzero(flags))


def _optimizer_part(step: OptimizerStep) -> list[Any]:
    committed = None if step.committed is None else list(step.committed)
    return [step.stepped, list(step.consumed), committed, step.grad_scale, step.found_inf]


def _optimizer_step(
    stepped: bool,
    consumed: list[dict[str, Any]],
    committed: list[dict[str, Any]] | None,
    grad_scale: float | None,
    found_inf: float | None,
) -> OptimizerStep:
    after = None if committed is None else tuple(committed)
    return OptimizerStep(stepped, tuple(consumed), after, grad_scale, found_inf)
