"""A registered optimizer comes back bit for bit after SIGKILL, or is refused by name before that is asked of it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, LowDiffError, UnsupportedOptimizer, UsageError
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.replay import optimizers
from lowdiff.recovery.replay.proof import Held
from tests.crash import third_party, third_party_run
from tests.crash.pool import Pool
from tests.crash.third_party_run import (
    backward,
    digest,
    digests,
    made,
    model,
    recovered_digest,
    train,
)
from tests.crash.trainings import wrapped
from tests.processes import Script

UNTIL = 16


@pytest.fixture(autouse=True)
def third_parties() -> Iterator[None]:
    """They are known here until the test ends."""
    with testing.own_registrations():
        third_party.register()
        third_party.CountingAll.steps = 0
        yield


def one_life(kind: str, folder: Path, dies: int, strategy: str) -> int:
    """A process of its own; its exit status."""
    words = [kind, folder, UNTIL, dies, strategy]
    process = Script(third_party_run.main, *words, output=folder.with_suffix(".txt"))
    code = process.wait()
    assert code in (0, -signal.SIGKILL), process.printed()[-3000:]
    return code


@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("FlatMuon", "log"),
        ("LateShampoo-5", "replica"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("FlatMuon", "replica"),
                ("LateShampoo-5", "log"),
                ("LateShampoo-12", "log"),
                ("LateShampoo-12", "replica"),
                ("Lion", "log"),
                ("Lion", "replica"),
            ]
        ),
    ],
)
def test_after_sigkill_every_step_has_the_bits_of_an_uninterrupted_run(
    tmp_path: Path, kind: str, strategy: str
) -> None:
    folder = tmp_path / "killed"
    for dies in (6, 13):
        assert one_life(kind, folder, dies, strategy) == -signal.SIGKILL
        newest = recovered_digest(folder / "run", folder / "staging", dies - 1)
        assert newest == digests(folder)[dies - 1]
    assert one_life(kind, folder, -1, strategy) == 0
    (tmp_path / "whole").mkdir()
    train(kind, tmp_path / "whole", UNTIL)
    whole, killed = digests(tmp_path / "whole"), digests(folder)
    assert whole.keys() == killed.keys()
    if strategy == "log":  # a replica leaves training as it is, and keeps no differentials
        assert killed == whole
        for step in whole:
            assert recovered_digest(folder / "run", folder / "staging", step) == whole[step], step


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("kind", "step", "what"),
    [
        ("Drawing", 1, "parameter"),
        ("CountingAll", 1, "parameter"),
        ("CountingItself", 2, "parameter"),
        ("Forgetting", 1, r"state\['noise'\]"),
    ],
)
@pytest.mark.parametrize("replica", [False, True], ids=["log", "replica"])
def test_what_does_not_replay_is_refused_by_name_at_that_step(
    tmp_path: Path, kind: str, step: int, what: str, replica: bool
) -> None:
    message = rf"third_party\.{kind}.* step {step} .*{what}"
    with pytest.raises(UnsupportedOptimizer, match=message):
        train(kind, tmp_path, UNTIL, replica=replica)
    known = {0, *range(1, step)}
    for number in range(1, step + 1):
        if number in known:
            found = lowdiff.recover(tmp_path / "run", number, staging=tmp_path / "staging")
            assert found.step == number
        else:
            with pytest.raises(LowDiffError):
                lowdiff.recover(tmp_path / "run", number, staging=tmp_path / "staging")


def test_a_granularity_that_is_too_fine_is_refused(tmp_path: Path) -> None:
    optimizers.GRANULARITY[f"{third_party.__name__}.Whitening"] = "element"
    with pytest.raises(UnsupportedOptimizer, match=r"Whitening.*registered as 'element'"):
        train("Whitening", tmp_path, 3)


def test_a_constructor_that_wants_something_else_is_refused_by_attach(tmp_path: Path) -> None:
    net = model()
    optimizer = third_party.Demanding(net.parameters(), net)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.2)
    )
    with pytest.raises(UnsupportedOptimizer, match=r"Demanding cannot be built.*'model'"):
        checkpointer.attach(net, optimizer)
    assert not list(tmp_path.rglob("i0*")), "nothing was begun"


def test_state_that_comes_late_costs_a_snapshot_and_is_proven_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train("LateShampoo-12", tmp_path, UNTIL, snapshot_every=100)
    assert "changed outside optimizer.step()" not in caplog.text
    assert "LateShampoo began to keep state['left'], state['right'] in step 12" in caplog.text
    live = digests(tmp_path)
    for step, value in live.items():
        assert recovered_digest(tmp_path / "run", tmp_path / "staging", step) == value, step


def test_a_proof_draws_no_random_number_of_the_training(tmp_path: Path) -> None:
    """Of an optimizer that draws and does not use it, which is exact."""

    def drawn(kind: str) -> list[float]:
        net = model()
        optimizer = made(kind, net.parameters())
        found = []
        with lowdiff.Checkpointer(
            tmp_path / kind, staging=tmp_path / "staging", compressor=TopK(0.2)
        ) as checkpointer:
            checkpointer.attach(net, optimizer)
            torch.manual_seed(7)
            for number in checkpointer.steps(3):
                optimizer.zero_grad()
                backward(net, number)
                optimizer.step()
                found.append(float(torch.rand(())))
        return found

    torch.manual_seed(7)
    expected = []
    for _ in range(3):
        torch.rand(3)
        expected.append(float(torch.rand(())))
    assert drawn("Wasting") == expected


class Child(third_party.Lion):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_calls_its_parents_step_is_told_from_two_steps(tmp_path: Path) -> None:
    lowdiff.register_optimizer(Child)
    network = nn.Linear(3, 2)
    third_party.Lion(network.parameters())  # from now on PyTorch hooks the parent's step as well
    optimizer = Child(network.parameters())
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.2)
    )
    checkpointer.attach(network, optimizer)
    network(torch.ones(1, 3)).sum().backward()
    with pytest.raises(
        UsageError, match="step\\(\\) of Child began again in step 1 before it had ended"
    ):
        optimizer.step()
    checkpointer.close()


def test_steps_that_change_nothing_prove_nothing(tmp_path: Path) -> None:
    """A warmup that begins at a rate of zero: the first step that moves a parameter counts."""
    net = model()
    optimizer = third_party.CountingItself(net.parameters(), lr=0.0)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.2)
    )
    checkpointer.attach(net, optimizer)

    def go_on() -> None:
        for number in checkpointer.steps(6):
            optimizer.param_groups[0]["lr"] = 0.0 if number < 3 else 0.1
            optimizer.zero_grad()
            backward(net, number)
            optimizer.step()

    with pytest.raises(UnsupportedOptimizer, match=r"CountingItself.* step 4 "):
        go_on()
    checkpointer.close()
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 3


@pytest.mark.slow
def test_what_couples_elements_replays_on_the_threads_of_the_run(tmp_path: Path) -> None:
    """Products of matrices round by the number of threads, also those kept in state."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 700, bias=False), nn.ReLU(), nn.Linear(700, 350, bias=False))
    optimizer = made("LateShampoo-3", net.parameters())
    live = {}
    torch.set_num_threads(2)
    try:
        with lowdiff.Checkpointer(
            tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.2), retention=None
        ) as checkpointer:
            checkpointer.attach(net, optimizer)
            for number in checkpointer.steps(5):
                optimizer.zero_grad()
                backward(net, number)
                optimizer.step()
                live[number + 1] = digest(net.state_dict(), optimizer.state_dict()["state"])
    finally:
        torch.set_num_threads(1)
    for step in (2, 3, 4):
        assert recovered_digest(tmp_path / "run", tmp_path / "staging", step) == live[step], step


def test_torchs_own_optimizers_pay_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("nothing of theirs is copied")

    monkeypatch.setattr(Held, "copied", refused)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.2)
    ) as checkpointer:
        checkpointer.attach(net, optimizer)
        for number in checkpointer.steps(2):
            backward(net, number)
            optimizer.step()


@pytest.mark.parametrize(("kind", "is_right"), [("Lion", True), ("CountingItself", False)])
def test_each_of_several_optimizer_steps_in_a_body_is_proven(
    tmp_path: Path, kind: str, is_right: bool
) -> None:
    net = model()
    optimizer = made(kind, net.parameters())
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run",
        staging=tmp_path / "staging",
        optimizer_steps="any",
        imports=["tests.crash.registered"],
    )
    checkpointer.attach(net, optimizer)

    def go_on() -> None:
        for number in range(5):
            for part in range(3):
                optimizer.zero_grad()
                backward(net, 3 * number + part)
                optimizer.step()
            checkpointer.commit()

    if is_right:
        go_on()
        testing.kill(checkpointer)
        newest = recovered_digest(tmp_path / "run", tmp_path / "staging", 5)
        assert newest == digest(net.state_dict(), optimizer.state_dict()["state"])
        return
    with pytest.raises(UnsupportedOptimizer, match=r"CountingItself.* step 1 "):
        go_on()
    checkpointer.close()


def rank_trains(
    rank: int,
    world_size: int,
    kind: str,
    folder: str,
    until: int,
    kill: int,
    strategy: str = "log",
) -> list[Any]:
    """One life of one rank: digests of every step, or what was refused and when."""
    third_party.register()
    net = wrapped(model())
    optimizer = made(kind, net.parameters())
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        staging=f"{folder}/staging",
        compressor=TopK(0.2) if strategy == "log" else None,
        imports=["tests.crash.registered"],
        snapshot_every=7,
        batch_size=3,
        retention=None,
    )
    found: list[str] = []
    try:
        resumed = checkpointer.attach(net, optimizer)
        for number in checkpointer.steps(until):
            optimizer.zero_grad()
            backward(net, number, rank)
            optimizer.step()
            found.append(digest(net.module.state_dict(), optimizer.state_dict()["state"]))
            if number + 1 == kill:
                testing.kill(checkpointer)
                return [resumed, found]
    except UnsupportedOptimizer as error:
        checkpointer.close()
        return [checkpointer.stats().get("committed_step", 0), str(error)]
    checkpointer.close()
    return [resumed, found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("Lion", "log"),
        ("FlatMuon", "log"),
        ("LateShampoo-5", "log"),
        ("Whitening", "log"),
        ("Lion", "replica"),
        ("LateShampoo-5", "replica"),
    ],
)
def test_two_ranks_go_on_with_the_bits_of_an_uninterrupted_run(
    pool: Pool, tmp_path: Path, kind: str, strategy: str
) -> None:
    whole = pool.run(rank_trains, 2, kind, str(tmp_path / "whole"), UNTIL, -1, strategy)
    folder = tmp_path / "killed"
    killed = pool.run(rank_trains, 2, kind, str(folder), UNTIL, 9, strategy)
    more = pool.run(rank_trains, 2, kind, str(folder), UNTIL, -1, strategy)
    for rank in range(2):
        resumed = more[rank][0]
        assert resumed == 8
        assert killed[rank][1][:resumed] + more[rank][1] == whole[rank][1]
    for step, value in enumerate(whole[0][1], start=1):
        if strategy == "log" or step == UNTIL:  # a replica keeps no differentials
            assert recovered_digest(folder / "run", folder / "staging", step) == value, step


def test_replicas_with_a_share_each_take_no_optimizer_that_couples_tensors(
    pool: Pool, tmp_path: Path
) -> None:
    told = pool.run(rank_trains, 2, "Whitening", str(tmp_path), UNTIL, -1, "replica")
    for _, text in told:
        assert "Whitening is registered as 'whole'" in text
        assert "2 replicas" in text


@pytest.mark.slow
def test_a_rank_without_a_share_takes_part(pool: Pool, tmp_path: Path) -> None:
    """Of two parameters three ranks have one, one, and none; state comes when the copies have ended."""
    whole = pool.run(rank_trains, 3, "LateShampoo-12", str(tmp_path), 14, -1)
    for step, value in enumerate(whole[0][1], start=1):
        assert recovered_digest(tmp_path / "run", tmp_path / "staging", step) == value, step
    found = inspect(tmp_path / "run")
    assert [step for step in found.snapshots if step] == [7, 12, 14]


@pytest.mark.parametrize(("kind", "why"), [("SharingMuon", "process group"), ("Drawing", "other")])
def test_all_ranks_hear_of_a_refusal_at_the_same_step(
    pool: Pool, tmp_path: Path, kind: str, why: str
) -> None:
    told = pool.run(rank_trains, 2, kind, str(tmp_path), UNTIL, -1)
    for committed, text in told:
        assert committed == 0
        assert f"third_party.{kind}" in text
        assert why in text


def test_a_refusal_of_one_rank_is_one_of_all(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(rank_trains, 2, "Partial", str(tmp_path), UNTIL, -1)
    assert [committed for committed, _ in told] == [0, 0]
    own, others = sorted((text for _, text in told), key=lambda text: text.startswith("rank "))
    assert "third_party.Partial" in own
    assert others in (f"rank 0: {own}", f"rank 1: {own}")
    with pytest.raises(LowDiffError):
        lowdiff.recover(tmp_path / "run", 1, staging=tmp_path / "staging")


def test_a_replica_imports_nothing_unasked_and_names_what_it_cannot_import(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    make = partial(lowdiff.Checkpointer, tmp_path / "run", staging=tmp_path / "staging")
    lion = third_party.Lion(net.parameters())
    checkpointer = make()
    with pytest.raises(UnsupportedOptimizer, match=r"Lion.*imports=\["):
        checkpointer.attach(net, lion)
    for wrong in ("no module", "", 3):
        with pytest.raises(ConfigError, match="imports"):
            make(imports=[wrong])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="imports"):
        make(imports="os")

    class Inner(third_party.Lion):
        """No other process can import it."""

    lowdiff.register_optimizer(Inner, "element")
    checkpointer = make(imports=["tests.crash.registered"])
    with pytest.raises(UnsupportedOptimizer, match=r"Inner is defined in the script itself or in"):
        checkpointer.attach(net, Inner(net.parameters()))
    checkpointer = make(imports=["no_such_module"])
    with pytest.raises(ConfigError, match="no_such_module"):
        checkpointer.attach(net, lion)
    assert not list(tmp_path.rglob("i0*")), "nothing was begun"
