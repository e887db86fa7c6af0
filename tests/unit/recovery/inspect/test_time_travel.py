"""Out of any step: a file, a folder for torch.distributed.checkpoint, a new run, a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import lowdiff
from lowdiff.cli.app import app
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import ConfigError, NotEnoughMemory, StepNotFound
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.compare import largest_ulps
from lowdiff.recovery.inspect.branch import start_run
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.inspect.inspection import forecast
from lowdiff.recovery.inspect.timeline import timeline
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay import sizing
from lowdiff.recovery.replay.replayer import ReplayOptions
from tests.unit.recovery.training import Model, Trained, adamw, train

STEPS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("travel"), STEPS, end="crash")


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_folder_is_what_dcp_load_reads(trained: Trained, tmp_path: Path) -> None:
    folder = export(lowdiff.recover(trained.run, 7, staging=trained.staging), tmp_path / "step7")
    model = Model()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    content: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 0,
    }
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    assert content["step"] == 7
    assert same(dict(content["model"]), dict(trained.models[7]))
    assert same(content["optimizer"]["state"], trained.optimizers[7][0]["state"])
    with pytest.raises(ConfigError, match="step7 exists"):
        export(lowdiff.recover(trained.run, 7, staging=trained.staging), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["step7"], "nothing half-written is left"


def test_a_new_run_starts_where_the_old_one_was_and_shares_nothing(
    trained: Trained, tmp_path: Path
) -> None:
    before = {p: p.read_bytes() for p in sorted(trained.run.rglob("*")) if p.is_file()}
    made = command(
        "recover", trained.run, "--step", 8, "--as-run", tmp_path / "run",
        "--staging", trained.staging,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert (state.step, state.base_step) == (8, 8)
    assert same(dict(state.model_state_dict()), dict(trained.models[8]))
    assert verify(tmp_path / "run", tmp_path / "staging").ok
    assert state.fence.run_id not in trained.run.joinpath("run.json").read_text()

    # The same code goes on from there, and every step of it can be had back.
    gone_on = train(tmp_path, STEPS, end="crash")
    assert min(gone_on.models) == 8
    assert same(dict(gone_on.models[8]), dict(trained.models[8]))
    assert same(gone_on.stateful[8], trained.stateful[8])
    newest = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert newest.step == STEPS
    assert same(dict(newest.model_state_dict()), dict(gone_on.models[STEPS]))
    assert {p: p.read_bytes() for p in before} == before, "the old run is as it was"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "compressor", [TopK(0.1, dense_below=64), PowerSGD(matrix_rank=1)], ids=repr
)
def test_a_new_run_from_a_snapshot_keeps_the_residual_and_so_the_bits(
    compressor: Compressor, tmp_path: Path
) -> None:
    old = train(tmp_path / "old", 8, end="crash", compressor=compressor)
    start_run(lowdiff.recover(old.run, 5, staging=old.staging), tmp_path / "run")
    gone_on = train(tmp_path, 8, end="crash", compressor=compressor)
    assert same(dict(gone_on.models[8]), dict(old.models[8]))


@pytest.mark.slow
def test_the_timeline_is_what_the_live_run_did(trained: Trained, tmp_path: Path) -> None:
    found = timeline(trained.run, staging=trained.staging)
    assert [step.step for step in found.steps] == list(range(1, STEPS + 1))
    names = [name for name, _ in Model().named_parameters()]
    for step in found.steps:
        before, after = trained.models[step.step - 1], trained.models[step.step]
        moved = torch.cat([(after[n] - before[n]).double().flatten() for n in names])
        assert step.update_norm == pytest.approx(float(moved.norm()), rel=1e-6)
        assert step.lr[0] == pytest.approx(1e-2 * 0.1 ** sum(step.step > m for m in (3, 6, 6)))
        assert 0 < step.density <= 1
        assert step.gradient_norm > 0
        assert step.stored_bytes > 0
    part = timeline(trained.run, first=7, last=9, staging=trained.staging)
    assert part.steps == found.steps[6:9]
    with pytest.raises(ConfigError, match="no step lies between first=9 and last=7"):
        timeline(trained.run, first=9, last=7, staging=trained.staging)
    with pytest.raises(StepNotFound, match=rf"step 99 of .*: the newest step is {STEPS};"):
        timeline(trained.run, first=99, staging=trained.staging)

    drawn = command(
        "timeline", trained.run, "--json", "--out", tmp_path / "t.png",
        "--staging", trained.staging,
    )  # fmt: skip
    assert drawn.exit_code == 0, drawn.output
    assert len(json.loads(drawn.output)["steps"]) == STEPS
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_tells_the_gradient_and_not_what_the_optimizer_made_of_it(
    tmp_path: Path,
) -> None:
    """With ``foreach``, Nesterov's momentum is added to the gradient in place."""

    def norms(foreach: bool) -> list[float]:
        done = train(
            tmp_path / str(foreach),
            4,
            build=lambda model: torch.optim.SGD(
                model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=foreach
            ),
        )
        return [step.gradient_norm for step in timeline(done.run, staging=done.staging).steps]

    assert norms(foreach=True) == pytest.approx(norms(foreach=False), rel=1e-5)


def test_a_plan_says_what_would_be_read(trained: Trained) -> None:
    found = forecast(trained.run, 9, trained.staging)
    assert (found.step, found.base, found.differentials) == (9, 5, 4)
    assert found.memory_bytes > found.snapshot_bytes > found.differential_bytes > 0
    printed = command(
        "recover", trained.run, "--step", 9, "--plan", "--json", "--staging", trained.staging
    )
    assert json.loads(printed.output)["base"] == 5
    told = command("recover", trained.run, "--step", 9, "--plan", "--staging", trained.staging)
    assert "4 differentials" in told.output


def test_a_lost_segment_is_named(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    for path in copy.run.rglob("*.seg"):
        path.unlink()
    with pytest.raises(StepNotFound, match="the differential of step 6 is missing for rank 0"):
        forecast(copy.run, 8)
    copy.shard(0).unlink()
    with pytest.raises(StepNotFound, match="recoverable steps"):
        lowdiff.recover(copy.run, 4, staging=copy.staging)


def test_a_run_that_may_only_be_read_is_recovered(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    paths = [copy.run, *copy.run.rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    before = {p: p.stat().st_mtime_ns for p in paths}
    assert lowdiff.recover(copy.run, 9).step == 9
    assert timeline(copy.run, last=4).steps
    assert {p: p.stat().st_mtime_ns for p in [copy.run, *copy.run.rglob("*")]} == before
    for path in paths:
        path.chmod(0o700)


def test_too_little_memory_is_refused_with_the_figure(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "free_memory", lambda: {"machine": 100 << 20})
    with pytest.raises(NotEnoughMemory, match=r"needs up to 256 MiB .* 100 MiB are free") as caught:
        lowdiff.recover(trained.run, 9, staging=trained.staging)
    assert caught.value.free_bytes == 100 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_distances_count_representable_numbers(dtype: torch.dtype) -> None:
    left = torch.tensor([1.0, -0.0, 0.0], dtype=dtype)
    right = torch.nextafter(torch.nextafter(left, left + 1), left + 1)
    assert largest_ulps(left, left) == 0
    assert largest_ulps(left[:1], right[:1]) == 2
    below = torch.nextafter(torch.zeros(1, dtype=dtype), -torch.ones(1, dtype=dtype))
    above = torch.nextafter(torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype))
    assert largest_ulps(below, above) == 2
    assert largest_ulps(left[:1] / 0, left[:1]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "x.pt", "--as-run", "new"), "one of --out"),
        ((), "one of --out"),
        (("--out", "x.pt", "--json"), "--json belongs to --plan"),
        (("--out", "x.bin"), "ends neither in"),
    ],
)
def test_bad_usage_says_what_to_give(
    trained: Trained, tmp_path: Path, arguments: tuple[Any, ...], message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    said = command("recover", trained.run, "--staging", trained.staging, *arguments)
    assert isinstance(said.exception, ConfigError | SystemExit)
    assert message in str(said.exception) + said.output
    assert not list(tmp_path.iterdir())


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        ReplayOptions(block_elements=0)
    with pytest.raises(ConfigError, match="counts threads"):
        ReplayOptions(num_workers=0)
