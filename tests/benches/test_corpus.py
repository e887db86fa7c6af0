from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benches.corpus import (
    batch_for_step,
    held_out_batch,
    is_held_out,
    load_corpus,
    source_files,
    standard_library,
)
from lowdiff.errors import ConfigError

TOKENS = torch.arange(1000).remainder(251).to(torch.uint8)


def batch(
    *, step: int = 3, rank: int = 0, world_size: int = 2, seed: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_for_step(
        TOKENS,
        step=step,
        rank=rank,
        world_size=world_size,
        seed=seed,
        batch_size=4,
        context=16,
    )


def numpy_state() -> list[int]:
    key: list[int] = np.random.get_state(legacy=False)["state"]["key"].tolist()
    return key


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for index in range(100):
        file = tmp_path / f"package{index % 3}" / f"module{index}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"%05d\n" % index * 300)
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left_out.py").write_bytes(b"\xff" * 1000)
    (tmp_path / "notes.txt").write_bytes(b"\xff" * 1000)
    return tmp_path


def lines(tokens: torch.Tensor) -> set[bytes]:
    return set(bytes(tokens.tolist()).split())


def test_every_file_is_either_trained_on_or_held_out(sources: Path) -> None:
    corpus = load_corpus(sources)
    train, held_out = lines(corpus.train), lines(corpus.held_out)
    assert len(train) + len(held_out) == 100
    assert not train & held_out
    assert len(held_out) > 2


def test_the_split_depends_on_the_relative_name_alone(sources: Path) -> None:
    held_out = lines(load_corpus(sources).held_out)
    for name, path in source_files(sources):
        assert is_held_out(name) == (path.read_bytes()[:5] in held_out)


def test_a_corpus_read_twice_is_the_same(sources: Path) -> None:
    first, second = load_corpus(sources), load_corpus(sources)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)


def test_the_corpus_stays_within_its_bound(sources: Path) -> None:
    corpus = load_corpus(sources, max_bytes=150_000)
    assert len(corpus.train) + len(corpus.held_out) <= 150_000


def test_too_little_text_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too little"):
        load_corpus(tmp_path)


def test_the_standard_library_has_megabytes_of_text() -> None:
    corpus = load_corpus(standard_library(), max_bytes=2_000_000)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 50_000


def test_targets_are_the_inputs_moved_by_one() -> None:
    inputs, targets = batch()
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_seed_step_and_rank_and_on_nothing_else() -> None:
    reference = batch()[0]
    torch.manual_seed(12345)
    torch.rand(10)
    assert torch.equal(batch()[0], reference)
    assert not torch.equal(batch(step=4)[0], reference)
    assert not torch.equal(batch(rank=1)[0], reference)
    assert not torch.equal(batch(seed=8)[0], reference)


def test_a_batch_leaves_the_global_generators_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), numpy_state()
    batch()
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert numpy_state() == numpy_before


def test_every_position_of_the_text_can_be_drawn() -> None:
    short = TOKENS[:18]  # room for two windows of 16 and their targets
    starts = {
        int(row[0])
        for step in range(20)
        for row in batch_for_step(
            short, step=step, rank=0, world_size=1, seed=0, batch_size=4, context=16
        )[0]
    }
    assert starts == {0, 1}


def test_held_out_windows_span_the_whole_text() -> None:
    inputs, targets = held_out_batch(TOKENS, batch_size=5, context=16)
    assert inputs.shape == (5, 16)
    assert inputs[0, 0] == TOKENS[0]
    assert targets[-1, -1] == TOKENS[-1]
