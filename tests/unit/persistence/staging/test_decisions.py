"""The tuner's decisions in staging: statistics, which may be damaged and stop nobody."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from lowdiff.attach.past import _keep_what_died
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.fences import create_run, write_fence
from lowdiff.persistence.staging.measurements import (
    append_decision,
    gather_measurements,
    read_decisions,
    read_measurements,
)
from tests.unit.persistence.made_runs import RUN_ID, fence
from tests.unit.persistence.staged_logs import folder_in

DECISIONS: list[dict[str, Any]] = [
    {"step": 7, "unix_seconds": 1700000000.25, "reasons": ["a", "\u00e9"], "batch_size": 4},
    {"step": 9, "reasons": []},
]


def decided(root: Path) -> StagingFolder:
    stage = folder_in(root / "staging")
    for decision in DECISIONS:
        append_decision(stage.decisions, decision)
    return stage


def test_every_flipped_bit_costs_its_line_and_no_other(tmp_path: Path) -> None:
    stage = decided(tmp_path)
    assert read_decisions(stage.decisions)[0] == DECISIONS
    whole = stage.decisions.read_bytes()
    first = whole.index(b"\n")
    for offset in range(first):
        for bit in (1, 4, 128):
            damaged = bytearray(whole)
            damaged[offset] ^= bit
            stage.decisions.write_bytes(damaged)
            found = read_decisions(stage.decisions)[0]
            # A flip that means the same, as of an escaped letter's case, does not count.
            assert found in ([DECISIONS[1]], DECISIONS)


def test_what_is_no_decision_is_passed_over_and_said_at_the_end_of_a_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = decided(tmp_path)
    with stage.decisions.open("ab") as file:
        for line in (b"\xff\xfe", b"[1]", b"7", b"null", b'{"step": 3}', b'{"a"', b"[" * 9999, b""):
            file.write(line + b"\n")
    with caplog.at_level(logging.WARNING):
        assert gather_measurements(stage, RUN_ID, 1, ended="").decisions == DECISIONS
        assert caplog.text == ""  # while it lives they are gathered every few seconds
        assert gather_measurements(stage, RUN_ID, 1, ended="died").decisions == DECISIONS
    assert f"8 decision(s) of the tuner in {stage.decisions} are damaged" in caplog.text


def test_an_attach_keeps_the_others_of_a_life_that_died(tmp_path: Path) -> None:
    stage, run = decided(tmp_path), RunFolder(tmp_path / "run")
    create_run(run, RUN_ID)
    write_fence(run, fence(0))
    stage.decisions.write_bytes(stage.decisions.read_bytes().replace(b"{", b"x", 1))
    _keep_what_died(run, RUN_ID, 0, [stage])
    assert read_measurements(run.measurements(0, 0)).decisions == DECISIONS[1:]
