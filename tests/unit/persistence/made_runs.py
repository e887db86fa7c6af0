"""Small runs made by hand: fences, manifests, staging logs and segments without a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import encode_scalars
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.framing import HEADER_BYTES, FileHeader, FileKind, RecordKind
from lowdiff.persistence.format.image import Manifest, manifest_file
from lowdiff.persistence.format.segment_file import seal_left
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.fences import write_fence
from lowdiff.persistence.staging.log import StagingLog, staged_records
from lowdiff.persistence.writer.segments import coded_record
from lowdiff.types import (
    Differential,
    Environment,
    Fence,
    Layout,
    OptimizerSpec,
    OptimizerStep,
    ParameterSpec,
    Payload,
    Section,
)
from tests.unit.recovery.training import flip

RUN_ID = "00112233445566778899aabbccddeeff"
LIFE = "ffeeddccbbaa99887766554433221100"
ENVIRONMENT = Environment(
    "cpu", "2.13", "some processor", "AVX2", 1, False, "", "float32", "highest"
)
LAYOUT = Layout((ParameterSpec("w", (2, 3), (3, 1), "float32", 0),))


def fence(
    incarnation: int, rank: int = 0, world_size: int = 1, base: int = 0, life: str = LIFE
) -> Fence:
    return Fence(
        run_id=RUN_ID,
        incarnation=incarnation,
        parent=incarnation - 1 if incarnation else None,
        base_step=base,
        rank=rank,
        world_size=world_size,
        environment=ENVIRONMENT,
        layout=LAYOUT,
        optimizers=(OptimizerSpec("torch.optim.sgd.SGD", (("w",),)),),
        compressor={"name": "topk", "settings": {"density": 0.01}},
        names={"w": "w", "alias": "w"},
        life=life,
        strategy="log",
    )


def differential(step: int) -> Differential:
    indices = Section("indices/float32", "ascending", np.array([1, step + 2], np.int64))
    values = Section("values/float32", "planes", np.array([step, 7], np.uint32))
    return Differential(
        step=step,
        incarnation=0,
        rank=0,
        world_size=1,
        optimizers=(OptimizerStep(True, ({"lr": 0.1, "betas": (0.9, 0.999)},)),),
        absent=(),
        held=(),
        payload=Payload((indices, values)),
        items={"rng/torch": b"state %d" % step},
    )


def stage(
    root: Path, steps: Sequence[int], incarnation: int = 0, rank: int = 0, base: int = 0
) -> StagingFolder:
    """A log with a base record and the differentials."""
    folder = StagingFolder.of(root, RUN_ID, incarnation, rank)
    folder.root.mkdir(parents=True)
    log = StagingLog(folder, run_id=RUN_ID, world_size=1, chunk_bytes=4096, cap_bytes=1 << 20)
    log.append(RecordKind.BASE, base, encode_scalars(differential(base)), (), durable_step=-1)
    for step in steps:
        d = differential(step)
        kind = RecordKind.DIFFERENTIAL
        log.append(kind, step, encode_scalars(d), d.payload.sections, durable_step=-1)
    return folder


def segment(
    folder: RunFolder, stage: StagingFolder, steps: Sequence[int], *, seals: bool = False
) -> Path:
    """A segment with some of the records of a log; with a footer if its writer ``seals`` it."""
    header = FileHeader(FileKind.SEGMENT, RUN_ID, stage.incarnation, stage.rank, 1, steps[0])
    codec = Codec()
    coded = [
        coded_record(record, codec)
        for _, record in staged_records(stage)
        if record.header.kind is RecordKind.DIFFERENTIAL and record.header.step in steps
    ]
    path = folder.segment(stage.incarnation, stage.rank, steps[0])
    make_directory(path.parent)
    path.write_bytes(header.pack() + b"".join(coded))
    if seals:
        assert seal_left(path, header.owner)
    return path


def tear(log: StagingFolder, step: int) -> Path:
    """Let a bit of a staged differential's body flip; the chunk that holds it."""
    path, record = next(
        (path, record)
        for path, record in staged_records(log)
        if (record.header.step, record.header.kind) == (step, RecordKind.DIFFERENTIAL)
    )
    flip(path, record.offset + HEADER_BYTES)
    return path


def listed(catalog: Catalog, incarnation: int = 0, rank: int = 0) -> dict[int, bool]:
    """Step -> whether it was found in staging."""
    found = catalog.of(incarnation, rank)
    return {step: "segments" not in stored.path.parts for step, stored in sorted(found.items())}


def began(folder: RunFolder) -> None:
    """The fence of incarnation 0, and a manifest that says it outlived its attach."""
    write_fence(folder, fence(0))
    path = manifest_file(folder.snapshot(0, 0), 0)
    make_directory(path.parent)
    write_json(path, Manifest(RUN_ID, 0, 0, 0, 1, 0, 0, ()).document())
