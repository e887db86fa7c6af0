"""How far one has to go to follow a step, an attach or a recovery through the code.

    python -m tests.walk [--write]

Counts what is called on the calling thread, with a model of two layers: functions with a name
(comprehensions and lambdas do not count), the files of the product that hold them, and how often a
call leads back to a file that was entered before and left since.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK

ROOT = Path(__file__).parents[1]
_HEAD = "| walk | functions | files | returns to a file already left |\n|---|---|---|---|"
_BEGIN, _END = "<!-- tests.walk -->", "<!-- end -->"
PRODUCT = tuple(
    f"{ROOT}/{folder}/" for folder in ("lowdiff", "compressors", "persistence", "recovery", "tuner")
)


class Walk:
    """What was called while it watched."""

    def __init__(self) -> None:
        self.functions: set[CodeType] = set()
        self.files: set[str] = set()
        self.returns = 0
        self._file = ""
        self._real_paths: dict[str, str] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count what is called meanwhile."""
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        name = code.co_filename
        file = self._real_paths.get(name) or self._real_paths.setdefault(
            name, str(Path(name).resolve())
        )
        if not file.startswith(PRODUCT):
            return
        self.functions.add(code)
        if file != self._file:
            self.returns += file in self.files
            self.files.add(file)
            self._file = file

    def row(self, what: str) -> str:
        """A line of the table."""
        return f"| {what} | {len(self.functions)} | {len(self.files)} | {self.returns} |"


class Training:
    """A tiny run in a folder."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", compressor=TopK(0.1), snapshot_every=100
        )

    def attach(self) -> None:
        self.checkpointer.attach(self.model, self.optimizer)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.checkpointer.commit()


def walked(does: Callable[[], object]) -> Walk:
    """Call something and count."""
    walk = Walk()
    with walk.watching():
        does()
    return walk


def rows(folder: Path) -> list[str]:
    """The table's lines."""
    training = Training(folder)
    found = [walked(training.attach).row("`attach` to a new run")]
    for _ in range(4):  # what is done once is done
        training.backward()
        training.step()
    training.backward()
    found.insert(0, walked(training.step).row("one step"))
    training.checkpointer.close()
    training = Training(folder)
    found.append(walked(training.attach).row("`attach` to a run with history"))
    for _ in range(3):
        training.backward()
        training.step()
    training.checkpointer.close()
    recover = walked(lambda: lowdiff.recover(folder / "run", staging=folder / "staging"))
    return [*found, recover.row("`recover`")]


def main() -> None:
    """Print the table, or put it into docs/architecture.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/architecture.md")
    logging.getLogger("lowdiff").setLevel(logging.ERROR)
    writes = parser.parse_args().write
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        table = "\n".join([_HEAD, *rows(Path(folder))])
    if writes:
        document = ROOT / "docs" / "architecture.md"
        before, _, rest = document.read_text(encoding="utf-8").partition(_BEGIN)
        after = rest.partition(_END)[2]
        document.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")
    sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main()
