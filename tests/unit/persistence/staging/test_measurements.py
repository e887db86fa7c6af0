from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.staging.measurements import (
    WINDOW,
    Measurements,
    Recorder,
    gather_measurements,
    read_measurements,
    read_recorded,
    write_decisions,
    write_measurements,
)

SOME = Measurements(
    run_id="00" * 16,
    incarnation=3,
    rank=1,
    world_size=2,
    ended="died",
    samples={"batch_seconds": [0.1, 0.2], "batch_bytes": [12.0]},
    facts={"elements": 12.0, "host": "here"},
    decisions=[{"step": 5, "reasons": ["because"]}],
)


def test_a_document_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_measurements(folder, SOME)
    write_measurements(folder, replace(SOME, incarnation=12))
    paths = list(folder.all_measurements())
    assert [path.name for path in paths] == ["i000003-rank-0001.json", "i000012-rank-0001.json"]
    assert read_measurements(paths[0]) == SOME


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_measurements(folder, SOME)
    path = folder.measurements(3, 1)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0x11
        path.write_bytes(damaged)
        try:
            assert read_measurements(path) == SOME, f"byte {place}"  # white space between tokens
        except DamagedFile:
            continue


@pytest.mark.parametrize(
    "strange",
    [
        {"rank": -1},
        {"world_size": "2"},
        {"samples": {"a": [-1.0]}},
        {"samples": {"a": ["x"]}},
        {"samples": {"a": 3}},
        {"samples": []},
        {"facts": {"a": [1]}},
        {"facts": {"a": True}},
        {"facts": {"a": float("nan")}},
        {"decisions": [3]},
        {"more": 1},
    ],
)
def test_a_strangers_document_is_refused(tmp_path: Path, strange: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path)
    write_measurements(folder, SOME)
    path = folder.measurements(3, 1)
    document = {**json.loads(path.read_text()), **strange}
    del document["crc32c"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({**document, "crc32c": crc32c(text.encode())}))
    with pytest.raises(DamagedFile, match=r"no measurements|no number of lowdiff"):
        read_measurements(path)


def test_full_windows_of_all_kinds_fit_on_a_page(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "page")
    for kind in range(9):
        for number in range(3 * WINDOW):
            recorder.observe(f"a_long_name_of_samples_{kind}", number / 3)
    recorder.set_facts(**{f"a_name_of_a_fact_{i}": 1 / 3 for i in range(16)})
    recorder.set_facts(processor="p" * 60, host="h" * 60)
    for _ in range(3):
        recorder.publish()
    samples, facts = read_recorded(tmp_path / "page")
    assert samples == recorder.samples()
    assert facts == recorder.facts()
    assert [len(values) for values in samples.values()] == [WINDOW] * 9
    assert samples["a_long_name_of_samples_0"][-1] == (3 * WINDOW - 1) / 3


def test_a_page_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert read_recorded(tmp_path / "page") == ({}, {})
    (tmp_path / "page").touch()
    assert read_recorded(tmp_path / "page") == ({}, {})
    (tmp_path / "page").unlink()
    recorder = Recorder(tmp_path / "page")
    assert read_recorded(tmp_path / "page") == ({}, {})
    recorder.set_facts(steps=2.0)
    recorder.publish()
    assert read_recorded(tmp_path / "page") == ({}, {"steps": 2.0})


def test_pages_of_trainer_and_writer_make_one_document(tmp_path: Path) -> None:
    staging = StagingFolder(tmp_path, 3, 1)
    trainer, writer = Recorder(staging.measured_by_trainer), Recorder(staging.measured_by_writer)
    trainer.observe("iteration_seconds", 0.5)
    trainer.set_facts(steps=4.0)
    trainer.publish()
    writer.observe("batch_seconds", 0.1)
    writer.publish()
    write_decisions(staging.decisions, [{"step": 8}])
    found = gather_measurements(staging, "00" * 16, 2, ended="died")
    assert found.samples == {"iteration_seconds": (0.5,), "batch_seconds": (0.1,)}
    assert found.facts == {"steps": 4.0}
    assert (found.ended, found.decisions) == ("died", [{"step": 8}])
    trainer.set_facts(ended="closed")
    trainer.publish()
    assert gather_measurements(staging, "00" * 16, 2, ended="died").ended == "closed"


def test_decisions_are_whole_or_said_to_be_lost_at_the_end_of_a_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = StagingFolder(tmp_path, 3, 1)
    decisions = [{"step": step, "reasons": ["\u00e9"]} for step in range(300)]
    write_decisions(staging.decisions, decisions)
    assert gather_measurements(staging, "00" * 16, 2, ended="died").decisions == decisions[-200:]
    whole = staging.decisions.read_bytes()
    for offset in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[offset] ^= 4
        staging.decisions.write_bytes(damaged)
        assert gather_measurements(staging, "00" * 16, 2, ended="").decisions == []
    assert caplog.text == ""  # while it lives they are gathered every few seconds
    assert gather_measurements(staging, "00" * 16, 2, ended="died").decisions == []
    assert f"decisions of the tuner are lost: {staging.decisions}" in caplog.text
