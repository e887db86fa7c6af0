"""Weights for tests, and targets that end in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lowdiff.errors import StorageError
from lowdiff.persistence.versions.target import FolderTarget
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter

Weights = dict[str, Tensor]


def weights_at(step: int, seed: int = 0) -> Weights:
    """Weights of a step: a few values are others than a step before, of one tensor all, of one none."""
    made: Weights = {}
    for number, (name, dtype, shape) in enumerate(
        [
            ("embedding", "BF16", (50, 8)),
            ("layer.weight", "BF16", (8, 40)),
            ("layer.bias", "F32", (40,)),
            ("count", "I64", ()),
            ("constant", "F16", (3, 1)),
            ("empty", "F32", (0, 4)),
        ]
    ):
        words = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "I64": "<u8"}[dtype]
        size = int(np.prod(shape))
        random = np.random.default_rng([seed, number])
        bits = random.integers(0, 1 << 15, size).astype(words)
        for passed in range(step if name != "constant" and size else 0):
            changing = np.random.default_rng([seed, number, passed])
            few = size if name == "layer.bias" else max(1, size // 50)
            places = changing.integers(0, size, few)
            bits[places] = changing.integers(0, 1 << 15, few)
        made[name] = Tensor(dtype, shape, bits)
    return made


def same(found: dict[str, Tensor], expected: Weights) -> bool:
    """Whether weights agree in every bit."""
    return found.keys() == expected.keys() and all(
        (found[name].dtype, found[name].shape) == (own.dtype, own.shape)
        and np.array_equal(found[name].bits, own.bits)
        for name, own in expected.items()
    )


class Ending(FolderTarget):
    """A folder whose writes fail after a number of them, as if the process died there."""

    def __init__(self, folder: Path, left: int) -> None:
        super().__init__(folder)
        self.left = left

    def _take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageError("the process died here")

    def create(self, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        self._take()
        return super().create(name, pieces)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._take()
            super().remove([name])


def published(folder: Path, steps: Iterable[int], **settings: int) -> None:
    """Publish steps as versions."""
    with VersionWriter(FolderTarget(folder), "run", **settings) as writer:
        for step in steps:
            writer.publish(step, 0, weights_at(step))
