"""A compressor that recovery would not find is refused before the first step, not after the last."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError


@dataclass(frozen=True)
class UnderTheNameOfItsBase(TopK):
    pass


@dataclass(frozen=True)
class UnderANewName(TopK):
    name: ClassVar[str] = "new"


@pytest.mark.parametrize("kind", [UnderTheNameOfItsBase, UnderANewName])
def test_it_is_refused_by_attach(tmp_path: Path, kind: type[TopK]) -> None:
    model = torch.nn.Linear(4, 4)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=kind(density=0.5)
    )
    with pytest.raises(ConfigError, match=f"{kind.__name__} is no compressor that recovery finds"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters()))
    assert not (tmp_path / "run" / "incarnations").exists()
