"""A stranger's run folder: refused by name, nothing executed, memory bounded, nothing outside touched.

Every document and record here has a checksum that holds: a stranger can compute one as well.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c

from lowdiff.errors import LowDiffError
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.document import read_json, write_json
from lowdiff.persistence.format.framing import FileHeader, RecordRef, padded, read_records
from lowdiff.persistence.format.sections import encode_sections, read_sections
from lowdiff.persistence.format.values import decode, encode
from lowdiff.types import Section
from tests.faults.damage import kept
from tests.faults.outcome import Outcome
from tests.faults.victim import TinyTraining, Victim, checkpointer_for, describe, digest_of

ROOT = Path(__file__).parents[2]
#: What a process that opens a hostile folder may need above one that opens a good one.
_MEMORY_BYTES = 256 << 20
_SECONDS = 60

_WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, float("nan"), "", "x", "../..", [], [1], {},
    {"x": 1}, [[]], ["x"], [-1], [2**62, 2**62],
)  # fmt: skip


def mutations(victim: Victim, rounds: int, *, seed: int = 0) -> Outcome:
    """Put an odd value somewhere into a document or a record, and make its checksum hold."""
    outcome = Outcome("odd values in documents and records whose checksums hold", seed)
    chance = random.Random(seed)
    documents = sorted(victim.run.rglob("*.json"))
    segments = sorted(victim.run.rglob("*.seg"))
    with outcome.timed():
        for number in range(rounds):
            path = chance.choice(segments if number % 2 else documents)
            with kept(path):
                if path.suffix == ".json":
                    content = read_json(path)
                    key = chance.choice(list(content))
                    content[key], what = _mutated(content[key], chance)
                    what = f"{key}: {what}"
                    write_json(path, content)
                else:
                    what = _mutate_record(path, chance)
                outcome.rounds += 1
                try:
                    digest_of(victim.recovered())
                    outcome.found["still a run"] += 1
                except LowDiffError as error:
                    outcome.found[type(error).__name__] += 1
                except Exception as error:
                    outcome.lose(f"{path.name}, {what}: {describe(error)}")
    return outcome


def _mutated(value: Any, chance: random.Random) -> tuple[Any, str]:
    """The value with one part somewhere inside replaced, and where."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inner, where = _mutated(value[key], chance)
        changed = dict(value) if isinstance(value, dict) else list(value)
        if chance.random() < 0.05:
            del changed[key]
            return changed, f"{key}: gone"
        changed[key] = inner
        return changed, f"{key}: {where}"
    new = chance.choice(_WEIRD)
    return new, repr(new)


def _mutate_record(path: Path, chance: random.Random) -> str:
    data = path.read_bytes()
    header = FileHeader.unpack(data, path)
    records = list(read_records(memoryview(data), header))
    chosen = chance.randrange(len(records))
    parts, what = [], ""
    for number, record in enumerate(records):
        meta, sections = meta_of(record), bytes(record.sections)
        if number == chosen:
            if chance.random() < 0.7:
                changed, what = _mutated(decode(meta), chance)
                meta = encode(changed)
            else:
                sections, what = _mutated_sections(record, chance)
        parts.append(signed(record, meta, sections))
    path.write_bytes(data[:64] + b"".join(parts))
    return f"step {records[chosen].header.step}, {what}"


def _mutated_sections(record: RecordRef, chance: random.Random) -> tuple[bytes, str]:
    codec = Codec()
    sections = list(read_sections(record.sections, codec, coded=True))
    at = chance.randrange(len(sections))
    way = chance.choice(["gone", "short", "far", "name", "twice"])
    section = sections[at]
    if way == "gone":
        del sections[at]
    elif way == "short":
        sections[at] = replace(section, data=section.data[: len(section.data) // 2])
    elif way == "far" and section.coding == "ascending":
        data = section.data.astype(np.int64)
        data[-1] = 2**62
        sections[at] = replace(section, data=data)
    elif way == "name":
        sections[at] = replace(section, name=chance.choice(["", "indices/complex64", "x"]))
    else:
        sections.append(section)
    return encode_sections(sections, codec), f"section {section.name} {way}"


def meta_of(record: RecordRef) -> bytes:
    """The encoded scalars, no longer shrunk."""
    return Codec().expand(record.meta) if record.header.meta_coded else bytes(record.meta)


def signed(record: RecordRef, meta: bytes, sections: bytes) -> bytes:
    """A record like another one, with other content and checksums that hold."""
    body = sections + meta.ljust(padded(len(meta)), b"\0")
    header = replace(
        record.header,
        meta_coded=False,
        meta_bytes=len(meta),
        body_bytes=len(body),
        body_checksum=crc32c(body),
    )
    return header.pack() + body + bytes(-len(body) % 8)


class _Bomb:
    """What a pickle of it does when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._proof}",)


def _pickles(run: Path, proof: Path) -> None:
    for path in [*run.rglob("*.json"), *run.rglob("*.safetensors"), *run.rglob("*.seg")]:
        path.write_bytes(pickle.dumps(_Bomb(proof)))


def _links_out(run: Path, proof: Path) -> None:
    outside = proof.parent / "outside"
    shutil.copytree(run / "snapshots", outside)
    shutil.rmtree(run / "snapshots")
    (run / "snapshots").symlink_to(outside)


def _link_to_file(run: Path, proof: Path) -> None:
    for path in run.rglob("*.seg"):
        path.unlink()
        path.symlink_to("/etc/passwd")


def _lock_is_a_link(run: Path, proof: Path) -> None:
    lock = run / "locks/rank-0000.lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(proof.parent / "precious")


def _next_segment_is_a_link(run: Path, proof: Path) -> None:
    for step in range(30):
        path = run / f"segments/rank-0000/i000001-s{step:010d}.seg"
        path.symlink_to(proof.parent / "precious")


def _next_shard_is_a_link(run: Path, proof: Path) -> None:
    for step in range(30):
        folder = run / f"snapshots/i000001-s{step:010d}"
        folder.mkdir()
        (folder / "rank-0000.safetensors.partial").symlink_to(proof.parent / "precious")


def _pipes(run: Path, proof: Path) -> None:
    for path in [*run.rglob("*.seg"), *run.rglob("*.safetensors")]:
        path.unlink()
        os.mkfifo(path)


def _folders(run: Path, proof: Path) -> None:
    for path in run.rglob("*.seg"):
        path.unlink()
        path.mkdir()


def _zstd_bomb(run: Path, proof: Path) -> None:
    for path in run.rglob("*.seg"):
        data = path.read_bytes()
        header = FileHeader.unpack(data, path)
        records = list(read_records(memoryview(data), header))
        zeros = Section("values/float32", "planes", np.zeros(1 << 24, np.uint64))
        bomb = encode_sections([zeros], Codec())
        parts = [signed(record, meta_of(record), bomb * 4) for record in records]
        path.write_bytes(data[:64] + b"".join(parts))


def _absurd_layout(run: Path, proof: Path) -> None:
    for path in run.glob("incarnations/*/*.json"):
        content = read_json(path)
        for parameter in content["layout"]["parameters"]:
            parameter["shape"], parameter["strides"] = [2**20, 2**20], [2**20, 1]
        write_json(path, content)


def _absurd_shard(run: Path, proof: Path) -> None:
    for path in run.rglob("*.safetensors"):
        head = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
        path.write_bytes(len(head).to_bytes(8, "little") + head.encode())
        manifest = path.with_suffix(".json")
        data = path.read_bytes()
        content = read_json(manifest)
        write_json(manifest, {**content, "bytes": len(data), "checksum": crc32c(data)})


def _parents_in_a_circle(run: Path, proof: Path) -> None:
    (path,) = run.glob("incarnations/*/*.json")
    write_json(path, {**read_json(path), "parent": 0})


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    "pickles": _pickles,
    "a folder that leads out": _links_out,
    "a file that leads out": _link_to_file,
    "a lock that leads out": _lock_is_a_link,
    "the next segment leads out": _next_segment_is_a_link,
    "the next shard leads out": _next_shard_is_a_link,
    "named pipes": _pipes,
    "folders for files": _folders,
    "a zstd bomb": _zstd_bomb,
    "an absurd layout": _absurd_layout,
    "an absurd shard": _absurd_shard,
    "parents in a circle": _parents_in_a_circle,
}


def strangers(victim: Victim, folder: Path, *, kinds: Sequence[str] = tuple(HOSTILE)) -> Outcome:
    """Open each hostile folder in a process of its own: once to recover, once to train on."""
    outcome = Outcome("a stranger's folder: " + ", ".join(kinds), seed=0)
    with outcome.timed():
        normal = _opened(victim.copied(folder / "good"), "recover")
        for kind in kinds:
            for way in ("recover", "attach"):
                place = folder / f"{kind}-{way}".replace(" ", "-")
                copy = victim.copied(place)
                proof, precious = place / "executed", place / "precious"
                precious.write_text("not to be touched")
                HOSTILE[kind](copy.run, proof)
                found = _opened(copy, way)
                outcome.rounds += 1
                what = f"{kind}, {way}"
                if "error" in found:
                    outcome.lose(f"{what}: {found['error']}")
                elif proof.exists():
                    outcome.lose(f"{what}: it was executed")
                elif precious.read_bytes() != b"not to be touched":
                    outcome.lose(f"{what}: a file outside of the run was written")
                elif found["peak_bytes"] > normal["peak_bytes"] + _MEMORY_BYTES:
                    outcome.lose(f"{what}: it took {found['peak_bytes'] >> 20} MiB")
                else:
                    outcome.found[f"{kind}: {found['verdict']}"] += 1
    return outcome


def _opened(victim: Victim, way: str) -> dict[str, Any]:
    """What became of a process that opened a run folder."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.faults.stranger", way, victim.run, victim.staging],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it went on for {_SECONDS} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr[-300:]}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """The process that opens a hostile folder."""
    way, victim = sys.argv[1], Victim(Path(sys.argv[2]), Path(sys.argv[3]))
    try:
        if way == "recover":
            found = {"verdict": f"step {victim.recovered().step}"}
        else:
            training = TinyTraining()
            with checkpointer_for(victim.run, victim.staging) as checkpointer:
                checkpointer.attach(training.model, training.optimizer, **training.stateful)
                for step in checkpointer.steps(20):
                    training.step(step)
            found = {"verdict": "trained on"}
    except LowDiffError as error:
        found = {"verdict": type(error).__name__}
    except Exception as error:
        found = {"error": describe(error)}
    # Not getrusage, which counts from before the exec.
    (line,) = (t for t in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in t)
    peak = int(line.split()[1]) << 10
    sys.stdout.write(json.dumps({**found, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
