"""A differential's scalars as bytes, and a stored record as a differential."""

from __future__ import annotations

from typing import Any

from lowdiff.errors import DamagedFile
from lowdiff.persistence.catalog import StoredRecord
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.sections import read_sections
from lowdiff.persistence.values import BadEncoding, decode, encode
from lowdiff.types import Differential, Digest, OptimizerStep, Payload, ResidualMark


def encode_scalars(differential: Differential) -> bytes:
    """Everything but the payload, as the meta part of a record."""
    residual, digest = differential.residual, differential.digest
    return encode(
        {
            "optimizers": [_optimizer_part(o) for o in differential.optimizers],
            "absent": list(differential.absent),
            "items": dict(differential.items),
            "residual": residual and [residual.slot, residual.checksum, residual.scale],
            "digest": digest and [digest.start, digest.stop, digest.value],
        }
    )


def read_differential(stored: StoredRecord, codec: Codec) -> Differential:
    """Decode a stored record.

    Raises:
        DamagedFile: If the checksummed bytes are still not a differential.
    """
    header = stored.record.header
    try:
        scalars = decode(bytes(stored.record.meta))
        sections = read_sections(stored.record.sections, codec, coded=header.coded)
        return Differential(
            step=header.step,
            incarnation=header.incarnation,
            rank=header.rank,
            world_size=header.world_size,
            optimizers=tuple(_optimizer_step(*o) for o in scalars["optimizers"]),
            absent=tuple(scalars["absent"]),
            payload=Payload(sections),
            items=scalars["items"],
            residual=scalars["residual"] and ResidualMark(*scalars["residual"]),
            digest=scalars["digest"] and Digest(*scalars["digest"]),
        )
    except (BadEncoding, KeyError, TypeError) as error:
        raise DamagedFile(
            stored.path, f"step {header.step} is no differential ({error})"
        ) from error


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
