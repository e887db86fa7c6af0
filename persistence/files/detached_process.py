"""Processes that outlive their trainer: what each is told, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from lowdiff.persistence.files.paths import RunFolder, StagingFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Whom a process serves, as it travels on its command line.

    Attributes:
        trainer_pid: The process whose end it watches for.
    """

    run: str
    staging_root: str
    run_id: str
    incarnation: int
    rank: int
    world_size: int
    trainer_pid: int

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.run))

    @property
    def staging(self) -> StagingFolder:
        """This incarnation's staging folder."""
        return StagingFolder.of(Path(self.staging_root), self.run_id, self.incarnation, self.rank)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class DetachedProcess(subprocess.Popen[bytes]):
    """A process that is meant to outlive us: to drop its handle while it runs is no mistake."""

    def __del__(self) -> None:
        # Popen would warn of it, which is an error under `python -W error`. No process id: it
        # could not be started.
        if self.returncode is None and self.pid and self.poll() is None:
            self.returncode = 0
        super().__del__()


def start_detached(
    module: str, settings: ProcessSettings, log: Path, **environment: str
) -> DetachedProcess:
    """Start a module with its settings, a pipe to its stdin, and its output appended to ``log``.

    Its environment is ours and ``environment``.
    """
    # In its own session, so that a launcher's kill of our process group does not reach it.
    with log.open("ab") as output:
        return DetachedProcess(
            [sys.executable, "-m", module, settings.to_json()],
            stdin=subprocess.PIPE,
            bufsize=0,  # what it is told goes out at once
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",  # `-m` looks there first: no module of the user's may shadow ours
            env={**os.environ, "PYTHONPATH": _import_path(), **environment},
        )


def _import_path() -> str:
    """Where this very lowdiff is found, ahead of whatever the environment says."""
    here = Path(str(sys.modules["lowdiff"].__file__)).parents[1]
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join([str(here), *map(os.path.abspath, others)])
