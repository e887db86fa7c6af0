"""Run README's script, kill it, start it again, get a step back, and write what was seen: ``python docs/make_transcript.py``."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
_SCRIPT = re.compile(r"```python\n(.*?)```", re.DOTALL)
_SHOWN = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
#: The process is killed once it has printed so many lines.
_LINES_BEFORE_KILL = 3


def script() -> str:
    """Return the training script that README shows first."""
    return str(_SCRIPT.findall(README.read_text())[0])


def shown() -> str:
    """Return the transcript that README shows."""
    return str(_SHOWN.findall(README.read_text())[0])


def transcript(folder: Path, earlier: int) -> str:
    """Return what is seen: the commands of README in a folder that holds its script.

    Args:
        folder: Holds ``train.py``; gets the run.
        earlier: The step that is got back.
    """
    lines = ["$ python train.py &", *_killed(folder), "$ kill -9 %1"]
    for command in (
        "python train.py",
        "lowdiff inspect runs/first | grep recoverable",
        f"lowdiff recover runs/first --step {earlier} --out earlier.pt",
    ):
        words = command.split(" | ")[0].split()
        # Of this environment, whatever is on the path.
        argv = [sys.executable, *(["-m", *words] if words[0] == "lowdiff" else words[1:])]
        ran = subprocess.run(argv, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        wanted = command.partition("grep ")[2]
        printed = [line.strip() for line in ran.stdout.splitlines() if wanted in line]
        lines += [f"$ {command}", *printed]
    return "\n".join(lines) + "\n"


def _killed(folder: Path) -> list[str]:
    """Start the script, kill it with SIGKILL and return what it printed."""
    with subprocess.Popen(
        [sys.executable, "train.py"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline().rstrip() for _ in range(_LINES_BEFORE_KILL)]
        process.kill()
        return [*seen, *process.stdout.read().splitlines()]


def main() -> None:
    """Write it into README."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(script())
        seen = transcript(folder, 1950)
    README.write_text(README.read_text().replace(shown(), seen))


if __name__ == "__main__":
    main()
