"""A follower has the bits of the training that it follows, whatever that goes through."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.errors import StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.follower import Follower
from lowdiff.recovery.plan import RecoveryPlan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import carry_out
from lowdiff.recovery.state import RecoveredState
from tests.unit.cli.commands import Command, command
from tests.unit.recovery.live import Training, killed, training

__all__ = ["command"]


def test_each_step_is_followed_to_the_bit(tmp_path: Path) -> None:
    with training(tmp_path, snapshot_every=4) as live, live.follow() as follower:
        assert not Follower(tmp_path / "nothing").look()
        with pytest.raises(StepNotFound, match="nothing was followed yet"):
            follower.state  # noqa: B018
        assert follower.look()
        live.assert_followed(follower)
        for _ in range(10):
            assert not follower.look()
            live.train()
            assert follower.look()
            live.assert_followed(follower)
        assert follower.num_withdrawn == 0


def test_only_every_so_many_steps(tmp_path: Path) -> None:
    with training(tmp_path, snapshot_every=6) as live, live.follow() as follower:
        seen = []
        for _ in range(15):
            live.train()
            if follower.look(every=4):
                seen.append(follower.step)
        assert seen == [0, 4, 8, 12]


def test_a_follower_that_comes_late_or_lags_has_the_newest_step(tmp_path: Path) -> None:
    settings = {"snapshot_every": 4, "retention": lowdiff.Retention(snapshots=1)}
    with training(tmp_path, **settings) as live, live.follow() as follower:
        live.train(3)
        assert follower.look()
        live.train(20)  # retention removes what leads on from step 3
        live.wait_for_snapshot(20)
        assert follower.look()
        live.assert_followed(follower)


def test_lives_that_go_on_are_followed(tmp_path: Path) -> None:
    first = killed(tmp_path, 5)
    with first.follow() as follower:
        assert follower.look()
        first.assert_followed(follower)
        with training(tmp_path) as second:
            second.train(2)
            assert second.step == 7
            assert follower.look()
            second.assert_followed(follower)
        assert follower.num_withdrawn == 0


def test_steps_that_are_lost_are_withdrawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = killed(tmp_path, 5, batch_size=64)
    with first.follow() as follower:
        assert follower.look()
        first.assert_followed(follower)
        shutil.rmtree(tmp_path / "staging")  # as a reboot does
        with training(tmp_path) as second:
            second.train(1)
            assert second.step < 5
            assert follower.look()
            second.assert_followed(follower)
            assert follower.num_withdrawn == 1
            assert "LD611" in caplog.text
            second.train(6)
            assert follower.look()
            second.assert_followed(follower)
        assert follower.num_withdrawn == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("first_look", [2, 5, 7])
def test_another_run_in_the_folder_takes_the_states_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first_look: int
) -> None:
    with training(tmp_path) as first:
        first.train(5)
        follower = first.follow()
        assert follower.look()
        first.assert_followed(follower)
    shutil.rmtree(tmp_path / "run")
    assert not follower.look()
    with follower, training(tmp_path) as second:
        torch.manual_seed(77)
        second.train(first_look)
        assert follower.look()
        second.assert_followed(follower)
        assert (follower.incarnation, follower.num_withdrawn) == (0, 1)
        assert "took the place of run" in caplog.text
        assert "LD605" not in caplog.text
        assert not follower.look()
        for _ in range(5):
            second.train()
            assert follower.look()
            second.assert_followed(follower)
        assert follower.num_withdrawn == 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_another_life_of_the_same_number_takes_the_states_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    with training(tmp_path) as live:
        live.train(4)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    with training(tmp_path) as first:
        first.train(2)
        follower = first.follow()
        assert follower.look()
        first.assert_followed(follower)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "kept").rename(tmp_path / "run")
    with follower, training(tmp_path) as second:
        torch.manual_seed(77)
        second.train(steps)
        assert follower.look()
        second.assert_followed(follower)
        assert (follower.incarnation, follower.num_withdrawn) == (1, 1)
        assert "another life 1 took the place" in caplog.text
        second.train()
        assert follower.look()
        second.assert_followed(follower)


def test_a_snapshot_that_leads_to_no_wanted_step_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[int] = []

    def counting(catalog: Catalog, plan: RecoveryPlan, options: ReplayOptions) -> RecoveredState:
        loads.append(plan.step)
        return carry_out(catalog, plan, options)

    monkeypatch.setattr("lowdiff.recovery.follower.carry_out", counting)
    with training(tmp_path) as live, live.follow() as follower:
        live.train(4)
        assert follower.look(every=4)
        live.train(1)
        next(iter(live.optimizer.state.values()))["exp_avg"].add_(1.0)  # only a snapshot leads on
        live.train(2)
        live.wait_for_snapshot(6)
        for _ in range(3):
            assert not follower.look(every=4)
        assert loads == [4]
        live.train(1)
        assert follower.look(every=4)
        live.assert_followed(follower)
        assert loads == [4, 8]


def test_what_is_not_durable_may_be_passed_over(tmp_path: Path) -> None:
    with (
        training(tmp_path, batch_size=64, snapshot_every=4) as live,
        live.follow(durable=True) as follower,
    ):
        assert follower.look()
        live.train(3)
        assert not follower.look()
        live.train(1)
        live.wait_for_snapshot(4)
        assert follower.look()
        live.assert_followed(follower)


@pytest.mark.parametrize("strategy", ["replica", "gradients"])
def test_a_run_without_a_log_is_followed_by_what_is_in_memory(
    tmp_path: Path, strategy: str
) -> None:
    with training(tmp_path, strategy=strategy) as live, live.follow() as follower:
        for _ in range(4):
            live.train()
            assert follower.look()
            live.assert_followed(follower)


@pytest.mark.parametrize("strategy", ["replica", "gradients"])
def test_without_its_memory_it_is_followed_by_snapshots(tmp_path: Path, strategy: str) -> None:
    with (
        training(tmp_path, strategy=strategy, snapshot_every=3) as live,
        live.follow(durable=True) as follower,
    ):
        live.train(3)
        live.wait_for_snapshot(3)
        assert follower.look()
        live.assert_followed(follower)
        live.train(1)
        assert not follower.look()


def test_what_nobody_noticed_is_passed_with_the_next_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        training(tmp_path, watch="recovery", snapshot_every=6) as live,
        live.follow() as follower,
    ):
        live.train(2)
        assert follower.look()
        live.model.first.weight.data.mul_(0.5)
        live.train(2)
        follower.look()
        assert follower.step == 2
        assert "LD605" in caplog.text
        follower.look()
        assert not follower.look()
        live.train(3)
        live.wait_for_snapshot(6)
        assert follower.look()
        live.assert_followed(follower)


def test_a_store_is_followed(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with training(tmp_path, store=url, snapshot_every=3) as live, Follower(url) as follower:
        assert follower.look()
        assert follower.step == 0
        live.train(4)
        lowdiff.testing.wait_until(live.checkpointer, lambda stats: stats["remote_step"] >= 3)
        assert follower.look()
        assert 3 <= follower.step <= 4


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def newest_in(store: Path) -> int:
    """Step of the newest snapshot in a store that is a folder."""
    return max(step for _, step, _ in RunFolder(store).snapshots())


@pytest.mark.slow
def test_of_a_store_only_what_leads_on_is_kept(tmp_path: Path, cache: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with training(tmp_path, store=url, snapshot_every=3) as live, Follower(url) as follower:
        weights = {0: clone(live)}
        (here,) = cache.iterdir()
        assert follower.look()
        fetched = newest_in(tmp_path / "store/run")
        for number in range(1, 6):
            for _ in range(3):
                live.train()
                weights[live.step] = clone(live)
            lowdiff.testing.wait_until(
                live.checkpointer, lambda stats: stats["remote_step"] >= live.step - 1
            )
            assert follower.look()
            assert follower.step >= 3 * number - 1
            found = follower.state.model_state_dict()
            for name, tensor in weights[follower.step].items():
                assert has_same_bits(found[name], tensor), name
            follower.look()
            assert not list(
                here.glob("run/snapshots/*/*.safetensors")
            )  # the log led past all others
            assert len(list(here.glob("run/segments/*/*.seg"))) <= 2
        assert newest_in(tmp_path / "store/run") > fetched
        assert follower.num_withdrawn == 0


@pytest.mark.slow
def test_a_step_of_a_store_that_needs_a_snapshot_gets_it(tmp_path: Path, cache: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with training(tmp_path, store=url) as first:
        first.train(4)
    with Follower(url) as follower:
        (here,) = cache.iterdir()
        assert follower.look()
        first.assert_followed(follower)
        with training(tmp_path, store=url) as second:
            second.train(1)
            next(iter(second.optimizer.state.values()))["exp_avg"].add_(1.0)
            second.train(2)
            second.wait_for_snapshot(6)
        assert not follower.look(every=8)
        assert not list(here.glob("run/snapshots/*/*"))
        assert follower.look()
        second.assert_followed(follower)
        with training(tmp_path, store=url) as third:
            third.train(2)
        assert follower.look()
        third.assert_followed(follower)
        assert not list(here.glob("run/snapshots/*/*"))
        assert follower.num_withdrawn == 0


@pytest.mark.slow
def test_another_run_in_the_store_takes_the_states_place(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    with training(tmp_path, store=url) as first:
        first.train(5)
    with Follower(url, staging=tmp_path / "staging") as follower:
        assert follower.look()
        first.assert_followed(follower)
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "store" / "run")
        with training(tmp_path, store=url) as second:
            torch.manual_seed(77)
            second.train(5)
        assert follower.look()
        second.assert_followed(follower)
        assert follower.num_withdrawn == 1


def clone(live: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in live.model.state_dict().items()}


def test_the_command_refuses_a_folder_to_hand_out(tmp_path: Path, command: Command) -> None:
    found = command("follow", str(tmp_path / "run"), "--out", tmp_path / "folder")
    assert (found.code, "give FILE.pt or FILE.safetensors" in found.err) == (2, True)


def test_the_command_follows_and_hands_out(tmp_path: Path, command: Command) -> None:
    first = killed(tmp_path, 5)
    staging, out = str(tmp_path / "staging"), tmp_path / "weights.safetensors"
    words = "--staging", staging, "--until", 5, "--out", out, "--json"
    found = command("follow", str(tmp_path / "run"), *words)
    assert found.code == 0, found.err
    assert found.out == '{"step": 5, "incarnation": 0}\n'
    from safetensors.torch import load_file

    for name, tensor in load_file(out).items():
        assert has_same_bits(tensor, first.model.state_dict()[name])
