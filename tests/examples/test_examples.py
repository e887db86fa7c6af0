"""The examples run, go on where they were, and are short."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowdiff.demo.launch import child_processes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FRAMEWORK = {
    "accelerate_loop": "accelerate",
    "hf_trainer": "transformers",
    "lightning_trainer": "lightning",
}
#: How many processes torchrun starts.
RANKS = {"ddp_cnn": 2, "hsdp_topk": 4}
#: Where the framework restores its history as well, a resumed example returns the losses of all steps.
WHOLE_HISTORY = ("hf_trainer",)
#: Steps of the first life: where training ends within an epoch, Lightning begins another one.
FIRST = {"lightning_trainer": 32}
Main = Callable[[list[str]], dict[int, float]]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two threads of a small model mostly wait for each other, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main_of(name: str) -> Main:
    """The ``main`` of an example; its test is skipped where its framework is not installed."""
    if name in FRAMEWORK:
        pytest.importorskip(FRAMEWORK[name])
    main: Main = importlib.import_module(f"lowdiff.examples.{name}").main
    return main


def arguments(name: str, folder: Path, run: str, steps: int) -> list[str]:
    """What an example is started with."""
    given = [str(folder / run), f"--steps={steps}", f"--staging={folder / 'staging'}"]
    return [*given, f"--old={folder / 'old.pt'}"] if name == "from_torch_save" else given


def losses_in(text: str) -> dict[int, str]:
    """Loss of every step as printed; a later life's replaces an earlier's."""
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([-+.\de]+)\n", text)}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        "single_process",
        "ppo",
        "gan",
        "from_torch_save",
        # They are what they are: warnings of a framework are not lowdiff's.
        *(
            pytest.param(
                name,
                marks=[pytest.mark.framework, pytest.mark.filterwarnings("default")],
            )
            for name in FRAMEWORK
        ),
    ],
)
def test_an_example_that_is_started_again_goes_on_exactly(tmp_path: Path, name: str) -> None:
    main = main_of(name)
    steps = FIRST.get(name, 11)
    whole = main(arguments(name, tmp_path, "whole", steps + 5))
    first = main(arguments(name, tmp_path, "run", steps))
    second = main(arguments(name, tmp_path, "run", steps + 5))
    assert len(first) == steps
    assert len(second) == (steps + 5 if name in WHOLE_HISTORY else 5)
    assert first | second == whole


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["ddp_cnn", "single_process", "gan", "hsdp_topk", "ppo", "from_torch_save"]
)
def test_an_example_that_was_killed_ends_as_if_it_were_not(tmp_path: Path, name: str) -> None:
    whole = output_of(tmp_path, name, "whole")
    killed = output_of(tmp_path, name, "run", kill_after="step 30:")
    killed += output_of(tmp_path, name, "run")
    assert max(losses_in(killed)) >= 60
    assert losses_in(killed) == losses_in(whole)
    again = output_of(tmp_path, name, "run")
    assert "starting at step 60\n" in again
    assert not losses_in(again), "it is done"


def output_of(folder: Path, name: str, run: str, kill_after: str | None = None) -> str:
    """What an example printed until its end, or until all of it was killed."""
    launcher = [sys.executable]
    if name in RANKS:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS[name]}",
        ]
    words = [*launcher, f"examples/{name}.py", *arguments(name, folder, run, 60)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = folder / f"{run}-{kill_after is None}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=file, stderr=file)
    if kill_after is None:
        assert process.wait(200) == 0, output.read_text()[-3000:]
        return output.read_text()
    deadline = time.monotonic() + 200
    while kill_after not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.002)
    # The writer, and the replica where there is one, have left for sessions of their own.
    workers = child_processes(process.pid) if name in RANKS else []
    process.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    process.wait()
    return output.read_text()


def test_the_slurm_job_is_requeued_when_its_time_is_nearly_up(tmp_path: Path) -> None:
    told = tmp_path / "told"
    for name, does in (
        ("scontrol", 'echo "$@" >> told; if [ "$1" = show ]; then echo node7; echo node8; fi'),
        ("srun", 'echo srun "$@" >> told; sleep 1; echo trained >> told'),
    ):
        command = tmp_path / name
        command.write_text(f"#!/bin/bash\n{does}\n")
        command.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN": "runs/slurm",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
    }
    job = subprocess.Popen(["bash", EXAMPLES / "slurm_requeue.sh"], cwd=tmp_path, env=environment)
    while not told.exists() or "srun" not in told.read_text():
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    lines = told.read_text().splitlines()
    assert lines[0] == "show hostnames node[7-8]"
    assert "--cpus-per-task=32" in lines[1]  # srun takes it from the job no more
    assert "--nnodes=2" in lines[1]
    assert "--rdzv-endpoint=node7:29500 --rdzv-id=77-0 examples/ddp_gpt.py runs/slurm" in lines[1]
    assert lines[2:] == ["requeue 77", "trained"], "the trainers had time to end"


def test_every_example_is_short_and_in_the_list() -> None:
    listed = set(re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text()))
    present = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {
        "README.md",
        "__init__.py",
    }
    assert listed == present
    for name in present:
        assert len((EXAMPLES / name).read_text().splitlines()) < 120, name


@pytest.mark.launch
@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_sharded_run_goes_on_with_more_processes(tmp_path: Path) -> None:
    said = []
    for processes, steps in ((2, 110), (3, 220)):
        words = ["--standalone", f"--nproc-per-node={processes}", str(EXAMPLES / "fsdp2_gpt.py")]
        words += [str(tmp_path / "run"), f"--steps={steps}", f"--staging={tmp_path / 'staging'}"]
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        said.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert re.findall(r"step (\d+),", said[0]) == ["100"]
    assert re.findall(r"step (\d+),", said[1]) == ["200"]
