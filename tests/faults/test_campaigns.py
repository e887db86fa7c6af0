"""Every fault campaign at a small size; ``make soak`` runs them at full size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowdiff.errors import DamagedFile
from tests.crash.launch.survivor_lives import ENGINES
from tests.faults import damage, fuzz, kills, looks, peers, power, soak, storage, stranger
from tests.faults.outcome import Outcome
from tests.faults.replica_kills import replica_kills
from tests.faults.survivor_kills import survivor_kills
from tests.faults.victim import TinyTraining, Victim, checkpointer_for

pytestmark = [pytest.mark.launch, pytest.mark.new_processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> list[Victim]:
    torch.set_num_threads(1)
    return damage.make_victims(tmp_path_factory.mktemp("victims"))


def expect_nothing_lost(outcome: Outcome, rounds: int) -> None:
    assert not outcome.lost, "\n".join(outcome.lost)
    if outcome.not_run and not outcome.rounds:
        pytest.skip(outcome.not_run)
    assert outcome.rounds >= rounds


@pytest.mark.timeout(400)  # it waits for some 1,500 fsyncs
def test_no_committed_step_is_lost_to_sigkill_at_random_instants(tmp_path: Path) -> None:
    outcome = kills.kills(tmp_path, 8, seed=4)
    expect_nothing_lost(outcome, 8)
    assert outcome.found.keys() == {"trainer of 1", "writer of 1", "both of 1"}


@pytest.mark.parametrize("engine", ENGINES)
def test_no_committed_step_of_two_ranks_is_lost_to_sigkill(tmp_path: Path, engine: str) -> None:
    expect_nothing_lost(kills.kills(tmp_path, 3, world_size=2, engine=engine, seed=4), 3)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ENGINES)
def test_no_committed_step_is_lost_with_a_replica(tmp_path: Path, engine: str) -> None:
    outcome = replica_kills(tmp_path, 4, engine=engine, seed=4)
    expect_nothing_lost(outcome, 4)
    assert outcome.found.keys() == {"trainer of 1", "writer of 1", "both of 1"}


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_committed_step_is_lost_to_ten_kills_with_a_replica(
    tmp_path: Path, world_size: int
) -> None:
    expect_nothing_lost(replica_kills(tmp_path, 10, world_size=world_size, seed=5), 10)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ENGINES)
def test_survivors_save_the_state_wherever_a_rank_fails(tmp_path: Path, engine: str) -> None:
    expect_nothing_lost(survivor_kills(tmp_path, 10, world_size=2, engine=engine, seed=3), 10)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["topk", "replica"])
def test_nothing_of_a_live_run_looks_lost(tmp_path: Path, kind: str) -> None:
    expect_nothing_lost(looks.looks(tmp_path, 12, kind=kind), 12)


def test_files_cut_anywhere_lead_to_an_exact_step_or_a_named_error(victims: list[Victim]) -> None:
    outcome = damage.cuts(victims, every=397, seed=7)
    expect_nothing_lost(outcome, 200)
    kinds = {found.partition(":")[0] for found in outcome.found}
    assert kinds >= {"fence", "run.json", "segment", "manifest", "shard", "chunk", "residual"}


def test_flipped_bits_lead_to_an_exact_step_or_a_named_error(victims: list[Victim]) -> None:
    # Of 150 there were between 2 and 15 that cost steps, and once none.
    outcome = damage.flips(victims, 400, seed=5)
    expect_nothing_lost(outcome, 400)
    assert any("earlier" in verdict for verdict in outcome.found), "some bits are noticed"


def test_a_trainer_that_resumes_from_damage_is_exact_or_says_so(
    victims: list[Victim], tmp_path: Path
) -> None:
    expect_nothing_lost(damage.resumptions(victims, 8, tmp_path, seed=2), 8)


def test_a_power_failure_at_any_moment_costs_at_most_two_batches(tmp_path: Path) -> None:
    outcome = power.power_failures(tmp_path, 14, every=6)
    expect_nothing_lost(outcome, 60)


@pytest.mark.parametrize("kind", storage.TROUBLES)
def test_storage_trouble_is_said_and_outlived(tmp_path: Path, kind: str) -> None:
    expect_nothing_lost(storage.storage_troubles(tmp_path, kinds=[kind]), 1)


def test_a_zstd_bomb_is_refused_before_it_takes_memory(
    victims: list[Victim], tmp_path: Path
) -> None:
    expect_nothing_lost(stranger.strangers(victims[0], tmp_path, kinds=["a zstd bomb"]), 2)


@pytest.mark.parametrize("kind", [kind for kind in stranger.HOSTILE if "leads out" in kind])
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(
    victims: list[Victim], tmp_path: Path, kind: str
) -> None:
    victim = victims[0].copied(tmp_path)
    (tmp_path / "precious").write_text("not to be touched")
    stranger.HOSTILE[kind](victim.run, tmp_path / "proof")
    with pytest.raises(DamagedFile, match="a link, a pipe or a device"):
        victim.recovered()
    training = TinyTraining()
    with pytest.raises(DamagedFile, match="a link, a pipe or a device"):
        checkpointer_for(victim.run, victim.staging).attach(training.model, training.optimizer)
    assert (tmp_path / "precious").read_text() == "not to be touched"


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_every_strangers_folder_is_refused(victims: list[Victim], tmp_path: Path) -> None:
    expect_nothing_lost(stranger.strangers(victims[0], tmp_path), 2 * len(stranger.HOSTILE))


def test_odd_values_whose_checksums_hold_lead_to_named_errors(victims: list[Victim]) -> None:
    outcome = stranger.mutations(victims[0], 150, seed=2)
    expect_nothing_lost(outcome, 150)
    assert outcome.found["DamagedFile"], "some values are noticed"


def test_the_record_reader_takes_any_bytes(victims: list[Victim]) -> None:
    segment = next(victims[0].run.rglob("*.seg"))
    outcome = fuzz.fuzz(segment, 300)
    expect_nothing_lost(outcome, 200)
    assert outcome.found["records read"], "no input came as far as a record"


def test_a_loss_is_counted_and_described_in_the_report() -> None:
    outcome = Outcome("something", seed=1, rounds=30, not_run="a part of it", seconds=90.0)
    outcome.found["survived"] = 2
    for number in range(28):
        outcome.lose(f"round {number}")
    document = json.loads(json.dumps(soak.report({"some": outcome}, scale=0.5, seed=1)))
    assert soak.read(document) == {"some": outcome}
    assert document["lost"] == 28
    assert document["campaigns"][0]["found"] == {"survived": 2}
    text = soak.markdown(document)
    assert "30 rounds, **28 lost**, in 1.5 minutes at 0.5 of the full size, seed 1" in text
    assert "| something | 30 | survived 2; not run: a part of it | 28 |" in text


@pytest.mark.campaign
def test_the_peers_fail_as_the_table_says_and_lowdiff_does_not(tmp_path: Path) -> None:
    peers.main(["--out", str(tmp_path), "--rounds", "5", "--elements", str(1 << 16)])
    rows = {row["store"]: row for row in json.loads((tmp_path / "peers.json").read_text())["rows"]}
    assert rows["torch.save to one path"]["flip"] == "loaded silently (5 of 5)"
    assert rows["safetensors to one path"]["flip"] == "loaded silently (5 of 5)"
    assert "silently" not in str(rows["**lowdiff**"])
    assert rows["**lowdiff**"]["kill"].startswith("0 committed steps lost")
