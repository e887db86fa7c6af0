"""Ranks that were started differently are told at attach, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, PowerSGD, TopK
from lowdiff.errors import UnsupportedModel
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped


def attach(rank: int, world_size: int, folder: str, what: str) -> tuple[str, str]:
    """A pool's job: rank 2 differs."""
    odd = rank == 2
    name = "tail" if odd and what == "model" else "head"
    model = wrapped(nn.ModuleDict({"trunk": nn.Linear(4, 4), name: nn.Linear(4, 2)}))
    kind = PowerSGD(1) if odd and what == "kind" else TopK(0.1)
    density = TopK(0.2) if odd and what == "settings" else kind
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=density, staging=f"{folder}/staging"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        checkpointer.attach(model, optimizer)
    except lowdiff.LowDiffError as error:
        return type(error).__name__, str(error)
    checkpointer.close()
    return "attached", ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kind", "rank 2 compresses with powersgd({'matrix_rank': 1, 'dense_below': 1024"),
        ("settings", "rank 2 compresses with topk({'density': 0.2"),
        ("model", "rank 2 trains tail.weight float32[2, 4] where rank 0 trains head.weight"),
        ("nothing", ""),
    ],
)
def test_the_rank_that_differs_is_named_on_all(
    pool: Pool, tmp_path: Path, what: str, message: str
) -> None:
    expected = "attached" if what == "nothing" else "ConfigError"
    for kind, text in pool.run(attach, 3, str(tmp_path), what):
        assert kind == expected
        assert message in text
    assert (tmp_path / "run").exists() == (what == "nothing")


def test_sparse_gradients_are_refused_at_attach(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(0.1), staging=tmp_path / "staging"
    )
    with pytest.raises(UnsupportedModel, match=r"Embedding '0' makes sparse gradients"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_sparse_gradients_of_a_layer_of_ones_own_are_refused_when_they_come(
    tmp_path: Path,
) -> None:
    table = nn.Parameter(torch.randn(10, 4))
    model = nn.ParameterList([table])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(0.1), staging=tmp_path / "staging"
    )
    checkpointer.attach(model, optimizer)
    nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()
    with pytest.raises(UnsupportedModel, match=r"gradient of '0' has layout torch\.sparse_coo"):
        optimizer.step()
    checkpointer.close()


def test_a_dtype_that_the_compressor_cannot_take_is_refused_at_attach(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, dtype=torch.bfloat16)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", compressor=Cast(torch.float16), staging=tmp_path / "staging"
    )
    with pytest.raises(UnsupportedModel, match=r"'weight' is bfloat16.*choose torch\.bfloat16"):
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not (tmp_path / "run").exists()
