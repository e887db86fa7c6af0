"""How other stores fail, side by side: a flipped bit, a cut file, a kill in the middle of a save.

``python -m tests.faults.peers --out docs/results`` writes the table as peers.json and peers.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from benches import ending
from lowdiff.errors import LowDiffError
from tests.faults.damage import kept
from tests.faults.kills import kills
from tests.faults.victim import Victim, describe, live, verdict

ROOT = Path(__file__).parents[2]
#: Large enough that a save takes a while, small enough for a test.
ELEMENTS = 1 << 22
_CUT_BYTES = 4 << 10

State = dict[str, torch.Tensor]


def state_of(step: int, elements: int) -> State:
    """A state every element of which tells its step."""
    return {"weight": torch.full((elements,), float(step)), "moment": torch.full((elements,), step)}


def _load_dcp(folder: Path) -> State:
    reader = dcp.FileSystemReader(folder)
    entries: Any = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(e.size, dtype=e.properties.dtype) for name, e in entries.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def _newest(folder: Path) -> Path:
    return max(folder.glob("step-*"), key=lambda path: path.name)


Save = Callable[[State, int, Path], object]
STORES: dict[str, tuple[Save, Callable[[Path], State]]] = {
    "torch.save to one path": (
        lambda state, _, folder: torch.save(state, folder / "state.pt"),
        lambda folder: torch.load(folder / "state.pt"),
    ),
    "safetensors to one path": (
        lambda state, _, folder: save_file(state, folder / "state.safetensors"),
        lambda folder: load_file(folder / "state.safetensors"),
    ),
    "torch.distributed.checkpoint, same folder": (
        lambda state, _, folder: dcp.save(state, checkpoint_id=folder / "same", no_dist=True),
        lambda folder: _load_dcp(folder / "same"),
    ),
    "torch.distributed.checkpoint, new folder": (
        lambda state, step, folder: dcp.save(
            state, checkpoint_id=folder / f"step-{step}", no_dist=True
        ),
        lambda folder: _load_dcp(_newest(folder)),
    ),
}


def loaded(name: str, folder: Path, elements: int) -> str:
    """What loading brings: a step's state, another one, or an error."""
    try:
        state = STORES[name][1](folder)
    except (Exception, CheckpointException):  # of whatever kind: it was noticed
        return "detected"
    for step in (1, 2):
        expected = state_of(step, elements)
        if all(torch.equal(state.get(k, torch.empty(0)), v) for k, v in expected.items()):
            return f"step {step}"
    return "loaded silently"


def damaged(name: str, folder: Path, elements: int, rounds: int) -> tuple[str, str]:
    """A bit flipped in the largest file, and its end cut off."""
    folder.mkdir()
    STORES[name][0](state_of(1, elements), 1, folder)
    path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    chance, flips = random.Random(0), Counter[str]()
    for _ in range(rounds):
        with kept(path) as data:
            changed = bytearray(data)
            # In the middle, where the tensors are.
            changed[chance.randrange(len(data) // 4, 3 * len(data) // 4)] ^= 1
            path.write_bytes(changed)
            flips[loaded(name, folder, elements)] += 1
    with kept(path) as data:
        path.write_bytes(data[:-_CUT_BYTES])
        cut = loaded(name, folder, elements)
    return _words(flips), cut


def killed(name: str, folder: Path, elements: int, rounds: int) -> str:
    """SIGKILL at a random instant of the save of step 2, after step 1 was saved whole."""
    found, chance = Counter[str](), random.Random(0)
    names = {"step 1": "old", "step 2": "new", "detected": "newest unloadable"}
    for number in range(rounds):
        place = folder / f"kill-{number}"
        place.mkdir(parents=True)
        words = [sys.executable, "-m", "tests.faults.peers", "--save", name]
        with subprocess.Popen(
            [*words, "--out", str(place), "--elements", str(elements)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            seconds = float(process.stdout.readline())
            time.sleep(chance.random() * seconds)
            process.send_signal(signal.SIGKILL)
        result = loaded(name, place, elements)
        found[names.get(result, result)] += 1
        shutil.rmtree(place)
    return _words(found)


def _words(found: Counter[str]) -> str:
    total = sum(found.values())
    return ", ".join(f"{word} ({count} of {total})" for word, count in sorted(found.items()))


def lowdiff_row(folder: Path, rounds: int) -> tuple[str, str, str]:
    """The same three for lowdiff, in the shard that recovery of the newest step reads first."""
    victim = Victim(folder / "run", folder / "staging")
    live(victim, 12)
    path = max(p for p in victim.files() if p.suffix == ".safetensors")  # names tell the step
    chance, flips, cuts = random.Random(0), Counter[str](), Counter[str]()
    for number in range(rounds):
        with kept(path) as data:
            changed = bytearray(data)
            changed[chance.randrange(len(data))] ^= 1
            path.write_bytes(changed if number % 2 else data[:-_CUT_BYTES])
            (flips if number % 2 else cuts)[_verdict(victim)] += 1
    outcome = kills(folder / "kills", max(3, rounds // 10))
    lost = f"{len(outcome.lost)} committed steps lost in {outcome.rounds} kills"
    return _words(flips), _words(cuts), lost


def _verdict(victim: Victim) -> str:
    try:
        found = verdict(victim)
    except LowDiffError:
        return "detected"
    except AssertionError as error:
        return f"loaded silently: {describe(error)}"
    return {"exact": "newest step, exact", "earlier": "earlier step, exact and said"}.get(
        found, "detected"
    )


def table(rounds: int, elements: int = ELEMENTS) -> list[dict[str, str]]:
    """All rows."""
    rows = []
    with TemporaryDirectory(prefix="lowdiff-peers-") as name:
        folder = Path(name)
        for number, store in enumerate(STORES):
            flips, cut = damaged(store, folder / f"damaged-{number}", elements, rounds)
            kill = killed(store, folder / f"killed-{number}", elements, max(2, rounds // 5))
            rows.append({"store": store, "flip": flips, "cut": cut, "kill": kill})
        flips, cut, kill = lowdiff_row(folder / "lowdiff", rounds)
        rows.append({"store": "**lowdiff**", "flip": flips, "cut": cut, "kill": kill})
    return rows


def write(rows: Sequence[dict[str, str]], out: Path) -> None:
    """Both files."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"torch": torch.__version__, "elements": ELEMENTS, "rows": rows}
    (out / "peers.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["| store | 1 bit flipped | last 4 KiB cut | kill -9 in the save of step 2 |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| {r['store']} | {r['flip']} | {r['cut']} | {r['kill']} |" for r in rows]
    (out / "peers.md").write_text("\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Make the table, or be the process that is killed in a save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--elements", type=int, default=ELEMENTS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("lowdiff").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    if args.save is None:
        write(table(args.rounds, args.elements), args.out)
        return
    save = STORES[args.save][0]
    started = time.perf_counter()
    save(state_of(1, args.elements), 1, args.out)
    second = state_of(2, args.elements)
    sys.stdout.write(f"{time.perf_counter() - started}\n")
    sys.stdout.flush()
    save(second, 2, args.out)
    signal.pause()


if __name__ == "__main__":
    ending.run(main)
