"""What a stranger's run calls its things does not reach the terminal as more than text."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.cli.inspect import progress_table
from lowdiff.cli.output import plain_console
from lowdiff.compressors import TopK
from lowdiff.core.events import printable
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.progress import RankProgress, RunProgress
from tests.unit.cli.commands import Command, command  # noqa: F401

EVIL = "\x1b[31mred\x1b]0;title\x07\r\nlowdiff: all is well\x9b2J\u202e[bold]x[/bold]\u2028"
#: Everything but printable characters and the ends of lowdiff's own lines.
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


class Counter:
    """A stateful object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {EVIL: self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state[EVIL]


Counter.__qualname__ = f"Counter{EVIL}"


def counters() -> dict[str, Any]:
    """One, by such a name."""
    return {f"counter{EVIL}": Counter()}


class Odd(nn.Module):
    """A model whose parameters have such names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter(f"w{EVIL}".replace(".", ""), nn.Parameter(torch.ones(30, 8)))
        self.register_buffer(f"b{EVIL}".replace(".", ""), torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        (weight,) = self.parameters()
        return inputs @ weight.T


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of such names, in a folder of such a name."""
    folder = tmp_path_factory.mktemp("strange") / EVIL.replace("/", "")
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        folder / "run",
        compressor=TopK(0.5),
        snapshot_every=4,
        retention=None,
        staging=folder / "staging",
    )
    checkpointer.attach(model, optimizer, **counters())
    for step in checkpointer.steps(10):
        optimizer.zero_grad()
        model(torch.full((2, 8), float(step + 1))).square().mean().backward()
        optimizer.step()
    checkpointer.keep(10, label="kept")
    checkpointer.close()
    return folder


def harmless(text: str) -> bool:
    """Whether a terminal only prints it, and no line is a stranger's."""
    return not OBEYED.search(text) and "\nlowdiff: all is well" not in text


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "words",
    [
        "inspect RUN",
        "verify RUN",
        "recover RUN --plan",
        "recover RUN --out OUT.safetensors",
        "recover RUN --out OUT.safetensors --step 77",
        "recover RUN --as-run OUT-run",
        "timeline RUN",
        "timeline RUN --out OUT.png",
        "tune RUN --mtbf 4h",
        "gc RUN --keep-snapshots 1 --dry-run",
        "gc RUN --unpin none",
        "gc --staging --staging-folder STAGING",
        "gc RUN --staging --staging-folder STAGING --yes",
        "inspect STAGING",
        "inspect RUN --staging RUN/none",
    ],
)
def test_every_command_prints_it_as_text(
    made: Path,
    tmp_path: Path,
    command: Command,  # noqa: F811
    words: str,
) -> None:
    places = {"RUN": made / "run", "STAGING": made / "staging"}
    out = str(tmp_path / EVIL.replace("/", ""))
    line = [
        re.sub("^(RUN|STAGING)", lambda m: str(places[m[0]]), word).replace("OUT", out)
        for word in words.split()
    ]
    result = command(*line)
    assert "Traceback" not in result.err
    assert result.out or result.err
    assert harmless(result.out), result.out
    assert harmless(result.err), result.err


@pytest.mark.slow
def test_what_verify_says_of_damage_is_text(
    made: Path,
    tmp_path: Path,
    command: Command,  # noqa: F811
) -> None:
    run = tmp_path / EVIL.replace("/", "")
    shutil.copytree(made / "run", run)
    for path in run.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    result = command("verify", run)
    assert result.code == 1
    assert "FAILED" in result.out
    assert "\\x1b[31mred" in result.out
    assert harmless(result.out)
    assert harmless(command("recover", run, "--out", tmp_path / "x.pt").err)


def test_json_keeps_the_text_in_ascii(made: Path, command: Command) -> None:  # noqa: F811
    result = command("verify", made / "run", "--json")
    assert result.out.isascii()
    assert harmless(result.out)
    result = command("gc", made / "run", "--keep-snapshots", "1", "--dry-run", "--json")
    assert json.loads(result.out)["run"] == str(made / "run")


def test_watch_shows_a_writers_error_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, Any] = dict.fromkeys(RankProgress.__dataclass_fields__, 0)
    rank = RankProgress(**{**values, "trainer": f"alive{EVIL}", "error": f"[red]{EVIL}"})
    values = dict.fromkeys(RunProgress.__dataclass_fields__, 0)
    plain_console().print(
        progress_table(Path(f"runs/{EVIL}"), RunProgress(**{**values, "ranks": (rank,)}))
    )
    printed = capsys.readouterr().out
    assert "[red]" in printed.replace("\n", "").replace(" ", "")
    assert harmless(printed)


def test_attach_warns_of_it_as_text(
    made: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    model = Odd()
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", compressor=TopK(0.5), staging=tmp_path / "staging"
    )
    lock = FileLock(RunFolder(tmp_path / "run").lock(0))
    lock.acquire(f"process {EVIL}")
    assert harmless(lock.holder())
    lock.release()
    newest = max((tmp_path / "run/snapshots").iterdir()) / "rank-0000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    with caplog.at_level(logging.INFO, "lowdiff"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        assert checkpointer.attach(model, optimizer, **counters()) == 10
        checkpointer.close()
    assert caplog.records
    for record in caplog.records:
        assert harmless(record.getMessage()), record.getMessage()


def test_printable_keeps_letters_of_all_languages() -> None:
    text = "größe 层.0.重み naïve — ok [bold]"
    assert printable(text) == text
    assert printable("a\x1b[0m\n\u202eb\x85") == "a\\x1b[0m\\n\\u202eb\\x85"
