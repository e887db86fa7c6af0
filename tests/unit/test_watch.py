"""Figures for anything with ``log(dict, step=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowdiff.metrics
from lowdiff.errors import ConfigError
from tests.unit.loops import Loop


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.told.append((step, data))


def test_every_few_steps_the_figures_are_logged(tmp_path: Path) -> None:
    loop, recorder = Loop(tmp_path), Recorder()
    watch = lowdiff.metrics.Watch(loop.checkpointer, recorder, every=3)
    watch.log()
    assert recorder.told == []  # nothing is attached yet
    loop.attach()
    for number in range(7):
        loop.step(number)
        loop.checkpointer.commit()
        watch.step(number + 1 if number < 3 else None)
    assert [step for step, _ in recorder.told] == [3, 6]
    stats = loop.checkpointer.stats()
    for _, data in recorder.told:
        assert all(name.startswith("lowdiff/") for name in data)
        assert all(type(value) is float for value in data.values())
        assert data["lowdiff/writer_in_trouble"] == 0
    assert recorder.told[-1][1]["lowdiff/steps"] == 6
    loop.checkpointer.close()
    watch.log()
    means = [data["lowdiff/stall_seconds"] for _, data in recorder.told]
    total = 3 * means[0] + 3 * means[1] + means[2]
    assert total == pytest.approx(loop.checkpointer.stats()["stall_seconds"]["sum"])
    assert stats["rank"] == 0


def test_what_cannot_log_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match=r"logger is anything with log\(dict, step=...\)"):
        lowdiff.metrics.Watch(loop.checkpointer, print)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every counts steps, at least 1"):
        lowdiff.metrics.Watch(loop.checkpointer, Recorder(), every=0)
