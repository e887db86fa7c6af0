"""``lowdiff tune``, as a user types it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lowdiff.cli.tuning_report import question_of_run
from lowdiff.compressors import Cast
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import write_policy
from lowdiff.persistence.staging.measurements import read_measurements, write_measurements
from lowdiff.tuner.choice import Limits
from lowdiff.tuner.report import make_report
from lowdiff.tuner.side_by_side import Assumptions
from lowdiff.types import Retention
from tests.unit.cli.commands import Command, command
from tests.unit.loops import Loop

__all__ = ["command"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    Loop(folder).run(12)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


def test_a_run_is_told_what_to_use_and_why(command: Command, run: Path) -> None:
    before = files(run)
    result = command("tune", run, "--mtbf", "4h")
    assert (result.code, result.err) == (0, "")
    assert "recommended" in result.out
    assert "f = sqrt(2 C (M + K) / (r (T + d)))" in result.out
    assert "current" in result.out
    assert "snapshot_every = 5, batch_size = 16" in result.out
    assert "no checkpoints" in result.out
    assert files(run) == before


def test_the_same_as_json_and_as_a_page(command: Command, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = command("tune", run, "--mtbf", "4h", "--json", "--html", page)
    assert result.code == 0
    document = json.loads(result.out)
    assert document["current"] == {"snapshot_every": 5, "batch_size": 16}
    assert document["estimates"]["step_seconds"]["count"] == 11
    assert 0 < document["effective_share"] <= 1
    chosen = document["recommended"]["snapshot_every"]
    assert f"<b>{chosen:,}</b>" in page.read_text()


@pytest.mark.slow
def test_a_store_is_measured_and_reported_on(command: Command, tmp_path: Path) -> None:
    Loop(tmp_path, settings={"store": f"file://{tmp_path}/store", "batch_size": 2}).run(8)
    result = command("tune", tmp_path / "run", "--mtbf", "4h", "--json")
    estimates = json.loads(result.out)["estimates"]
    assert estimates["store_bytes_per_second"]["source"] == "measured"
    assert estimates["store_latency_seconds"]["count"] >= 1
    assert "in the store" in command("tune", tmp_path / "run", "--mtbf", "4h").out


def test_a_larger_job_fails_more_often(command: Command, run: Path) -> None:
    for path in RunFolder(run).all_measurements():
        life = read_measurements(path)
        facts = {**life.facts, "restart": "node", "began_unix_seconds": 1.0}
        write_measurements(RunFolder(run), replace(life, facts={**facts, "seen_unix_seconds": 1e6}))
    found = [json.loads(command("tune", run, "--world-size", str(n), "--json").out) for n in (1, 4)]
    small, large = (document["mtbf"]["total"]["mtbf_seconds"] for document in found)
    assert small == pytest.approx(4 * large)
    assert any("applied to 4" in text for text in found[1]["warnings"])


@pytest.mark.slow
def test_a_run_without_a_compressor_has_nothing_to_tune(command: Command, tmp_path: Path) -> None:
    Loop(tmp_path, settings={"compressor": None}).run(4)
    result = command("tune", tmp_path / "run", "--mtbf", "4h")
    assert result.code == 2
    assert "was trained without a compressor, by strategy replica" in result.error
    assert "nothing to tune" in result.error
    assert "at most 2 * snapshot_every steps" in result.error
    Loop(tmp_path).run(6)  # goes on with one
    assert command("tune", tmp_path / "run", "--mtbf", "4h").code == 0


@pytest.mark.slow
def test_error_feedback_in_snapshots_is_known_by_the_compressor(
    command: Command, run: Path, tmp_path: Path
) -> None:
    parameters = 20 * 60 + 60 + 2 * 60 + 60 * 3 + 3
    found = json.loads(command("tune", run, "--mtbf", "4h", "--json").out)["estimates"]
    assert found["residual_bytes"]["median"] == 4 * parameters
    assert found["residual_bytes"]["median"] < found["snapshot_bytes"]["median"]
    Loop(tmp_path / "cast", settings={"compressor": Cast(torch.bfloat16)}).run(6)
    result = command("tune", tmp_path / "cast/run", "--mtbf", "4h", "--json")
    assert "residual_bytes" not in json.loads(result.out)["estimates"]


@pytest.mark.slow
def test_what_is_stored_is_said_for_the_snapshots_that_the_run_keeps(
    command: Command, run: Path
) -> None:
    def stored(policy: Retention | None) -> tuple[float, str]:
        write_policy(RunFolder(run), read_run_id(RunFolder(run)), policy)
        document = json.loads(command("tune", run, "--mtbf", "4h", "--json").out)
        notes = [text for text in document["warnings"] if "retention" in text]
        return document["stored_bytes"], " ".join(notes)

    (two, nothing), (five, _) = stored(Retention(2)), stored(Retention(5))
    assert nothing == ""
    assert 5 / 2 > five / two >= 6 / 3
    assert "with the 5 newest snapshots kept" in command("tune", run, "--mtbf", "4h").out
    everything, note = stored(None)
    assert everything == two
    assert "keeps every step: it will hold more" in note
    assert "each step that is a multiple of 1,000" in stored(Retention(2, every_steps=1000))[1]
    several = stored(Retention(snapshots=None, age_hours=24))[1]
    assert "without limit of their number and all snapshots of the last 24 hours" in several


@pytest.mark.slow
def test_loading_that_was_never_measured_is_of_as_many_machines_as_all_ranks_name(
    command: Command, run: Path
) -> None:
    (path,) = RunFolder(run).all_measurements()
    life = replace(read_measurements(path), world_size=2)
    other = replace(life, rank=1)

    def loading() -> tuple[float, bool]:
        document = json.loads(command("tune", run, "--mtbf", "4h", "--json").out)
        notes = [text for text in document["warnings"] if "loading was never measured" in text]
        return document["estimates"]["load_seconds"]["median"], bool(notes)

    one, is_doubtful = loading()
    assert not is_doubtful
    write_measurements(RunFolder(run), life)
    assert loading() == (one, True)  # where rank 1 is nobody knows
    write_measurements(RunFolder(run), other)
    assert loading() == (one, False)
    write_measurements(RunFolder(run), replace(other, facts={**life.facts, "host": "elsewhere"}))
    assert loading() == (2 * one, False)


@pytest.mark.slow
def test_a_run_is_compared_with_what_can_exist_on_its_machines(run: Path) -> None:
    (path,) = RunFolder(run).all_measurements()
    life = read_measurements(path)

    def asked(*hosts: str, ranks: int) -> tuple[set[str], float, str]:
        """Others that need a peer, a rank's network, and what is noted of it."""
        for rank, host in enumerate(hosts):
            facts = {**life.facts, "host": host}
            here = replace(life, rank=rank, world_size=ranks, facts=facts)
            write_measurements(RunFolder(run), here)
        question = question_of_run(
            str(run),
            staging=None,
            mtbf_seconds=4 * 3600.0,
            node_share=0.5,
            world_size=None,
            limits=Limits(),
            failure_shape=1.0,
            assumptions=Assumptions(log_overhead_share=None),
        )
        names = {one.strategy.name for one in make_report(question).simulated}
        notes = " ".join(text for text in question.known_warnings if "Gemini" in text)
        return names & {"Gemini", "just-in-time"}, question.network_bytes_per_second, notes

    assert asked("a", ranks=1) == (set(), 10e9, "")
    names, network, note = asked("a", ranks=4)
    assert (names, network) == ({"Gemini", "just-in-time"}, 10e9)
    assert "10 GB/s of each rank" in note  # where the others are nobody knows
    assert asked("a", "a", "a", "a", ranks=4) == ({"just-in-time"}, 10e9 / 4, "")
    names, network, note = asked("a", "a", "b", "b", ranks=4)
    assert (names, network) == ({"Gemini", "just-in-time"}, 10e9 / 2)
    assert "10 GB/s of each node" in note


def test_strategies_are_compared_by_what_the_run_measured(command: Command, run: Path) -> None:
    document = json.loads(
        command("tune", run, "--mtbf", "4h", "--all-at-once", "0.5", "--json").out
    )
    found = document["side_by_side"]
    assert found["assumptions"] == asdict(
        Assumptions(log_overhead_share=None, all_at_once_share=0.5)
    )
    log = next(row for row in found["rows"] if row["name"] == "log")
    terms = document["waste_terms"]
    measured = terms["differentials"] + terms["snapshots"] + terms["backpressure"]
    assert log["overhead_share"] == pytest.approx(measured)


def test_a_run_may_be_called_as_it_likes(command: Command, run: Path) -> None:
    odd = run.rename(run.parent / "[bold]run :smile:")
    assert str(odd) in command("tune", odd, "--mtbf", "4h").out.replace("\n", "")


def test_without_history_it_says_what_to_give(command: Command, run: Path) -> None:
    result = command("tune", run)
    assert result.code == 2
    assert "has not failed yet" in result.error
    assert "--mtbf 4h" in result.error


def test_a_run_without_steps_is_sent_to_plan(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_json(run / "run.json", {"run_id": "00" * 16})
    result = command("tune", run, "--mtbf", "4h")
    assert result.code == 2
    assert "lowdiff plan" in result.error


def test_no_run_is_bad_data(command: Command, tmp_path: Path) -> None:
    result = command("tune", tmp_path / "nothing", "--mtbf", "4h")
    assert result.code == 1
    assert "no such folder" in result.error


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--mtbf", "4 parsecs", "'parsecs' is no unit"),
        ("--mtbf", "1ms", "the job cannot progress"),
        ("--memory", "9 apples", "'apples' is no unit"),
    ],
)
def test_nonsense_is_bad_usage(
    command: Command, run: Path, option: str, value: str, text: str
) -> None:
    given = () if option == "--mtbf" else ("--mtbf", "4h")
    result = command("tune", run, *given, option, value)
    assert result.code == 2
    assert text in result.error


@pytest.mark.parametrize(
    ("option", "value"), [("--node-share", "7"), ("--max-loss", "1"), ("--failure-shape", "0")]
)
def test_a_number_out_of_range_is_bad_usage_and_the_option_is_named(
    command: Command, run: Path, option: str, value: str
) -> None:
    result = command("tune", run, "--mtbf", "4h", option, value)
    assert result.code == 2
    assert f"Invalid value for '{option}'" in result.err
    assert "greater than" in result.err or "less than" in result.err


def test_measurements_from_another_machine_are_noticed(command: Command, run: Path) -> None:
    (path,) = RunFolder(run).all_measurements()
    life = read_measurements(path)
    write_measurements(
        RunFolder(run), replace(life, facts={**life.facts, "host": "elsewhere", "cores": 96.0})
    )
    result = command("tune", run, "--mtbf", "4h")
    assert "measured on elsewhere (96 cores), not on this machine" in result.out


@pytest.mark.slow
def test_a_run_that_is_being_written_is_read_and_left_alone(
    command: Command, tmp_path: Path
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.step(number)
    result = command("tune", tmp_path / "run", "--mtbf", "4h", "--staging", tmp_path / "staging")
    assert (result.code, result.err) == (0, "")
    assert "still training" in result.out
    for number in loop.checkpointer.steps(9):
        loop.step(number)
    loop.checkpointer.close()


def test_damaged_measurements_do_not_stop_it(command: Command, run: Path) -> None:
    (path,) = RunFolder(run).all_measurements()
    path.with_name("i000007-rank-0000.json").write_bytes(path.read_bytes()[:-40])
    result = command("tune", run, "--mtbf", "4h")
    assert result.code == 0


def test_a_store_is_no_run_folder(command: Command) -> None:
    result = command("tune", "s3://bucket/runs/gpt", "--mtbf", "4h")
    assert result.code == 2
    assert result.error.startswith("lowdiff: s3://bucket/runs/gpt is an object store; measurements")
    assert "give that folder" in result.error
    result = command("gc", "s3://bucket/runs/gpt", "--keep-snapshots", "1")
    assert result.code == 2
    assert result.error.startswith("lowdiff: s3://bucket/runs/gpt is an object store; collecting")


@pytest.mark.cases(1)
@pytest.mark.parametrize("limit", ["1MB", "1000000", "1e6", "0.001 GB"])
def test_limits_of_bytes_are_sizes_or_numbers_in_all_commands(
    command: Command, run: Path, limit: str
) -> None:
    document = json.loads(command("gc", run, "--total-bytes", limit, "--dry-run", "--json").out)
    assert document["policy"]["total_bytes"] == 1_000_000
    assert command("tune", run, "--mtbf", "4h", "--total", limit).code == 0
