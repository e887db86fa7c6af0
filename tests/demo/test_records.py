from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.demo.records import Attached, Finished, Record, RecordReader, RecordWriter, StepDone

RECORDS: list[Record] = [
    Attached(completed=3, seconds=0.5, time=1e9),
    StepDone(step=4, loss=(0.1).hex(), seconds=0.25, time=1e9 + 1, staged_bytes=1000),
    Finished(
        held_out_loss=(0.2).hex(),
        num_parameters=10,
        full_checkpoint_bytes=120,
        stats={"staged_bytes": 2000, "steps": 1},
        digests={"parameter a": "00"},
    ),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_what_is_written_is_read(tmp_path: Path, record: Record) -> None:
    with RecordWriter(tmp_path / "new" / "log") as writer:
        writer.write(record)
        assert RecordReader(tmp_path / "new" / "log").new() == [record]  # before close


def test_a_reader_follows_the_file(tmp_path: Path) -> None:
    reader = RecordReader(tmp_path / "log")
    assert reader.new() == []
    with RecordWriter(tmp_path / "log") as writer:
        for record in RECORDS:
            writer.write(record)
            assert reader.new() == [record]
    assert reader.new() == []


def test_a_torn_line_waits_for_its_end(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "whole") as writer:
        for record in RECORDS:
            writer.write(record)
    data = (tmp_path / "whole").read_bytes()
    torn, reader = tmp_path / "torn", RecordReader(tmp_path / "torn")
    torn.write_bytes(data[:-5])
    assert reader.new() == RECORDS[:-1]
    torn.write_bytes(data)
    assert reader.new() == RECORDS[-1:]
