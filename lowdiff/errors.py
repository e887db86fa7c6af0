"""Every error lowdiff raises, in one tree; `lowdiff demo` has another, ``WorkersFailed``.

::

    LowDiffError
    ├── ConfigError            a value or object the user gave cannot work    (also a ValueError)
    │   ├── UntrustedStaging       others could have written the staging folder
    │   ├── UnsupportedModel       sharded, sparse or complex parameters
    │   └── UnsupportedOptimizer   replay cannot reproduce this optimizer
    ├── UsageError             a call at the wrong moment                      (also a RuntimeError)
    ├── RankLost               an exchange between ranks failed                (also a RuntimeError)
    ├── RanksDiverged          ranks no longer hold the same parameters        (also a RuntimeError)
    ├── RunError               the run folder does not fit the request
    │   ├── NotARun                no run lives there
    │   ├── RunInUse               another live trainer holds it
    │   └── RunMismatch            its history belongs to another model or optimizer
    ├── StorageError           bytes could not be written or read
    │   ├── DamagedFile            bytes were read but are not what was written
    │   ├── OtherFormat            written by a lowdiff of another format version
    │   ├── StoreError             an object store refused, or did not answer
    │   └── WriterFailed           the background writer reported a failure
    └── RecoveryError          no consistent state can be rebuilt
        ├── NotEnoughMemory        the state would not fit
        ├── StepNotFound           that step is not in the run
        └── ReplayMismatch         the replayed bits differ from the recorded ones

Messages say what is wrong, where, and what to do; the facts are attributes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class LowDiffError(Exception):
    """Base of every error raised on purpose by lowdiff."""


class ConfigError(LowDiffError, ValueError):
    """A value or object given by the user cannot work."""


class UntrustedStaging(ConfigError):
    """A staging folder is not of this user alone, so others could have written what is in it.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, why: str, way_out: str) -> None:
        self.path = path
        super().__init__(
            f"the staging folder {path} {why}; staging has to be a real folder of this user that "
            f"others cannot write to: {way_out}, or pass Checkpointer(..., staging=FOLDER) with a "
            "folder of your own"
        )


class UnsupportedModel(ConfigError):
    """The model holds parameters that cannot be checkpointed differentially."""


class UnsupportedOptimizer(ConfigError):
    """The optimizer's update cannot be replayed bit for bit."""


class UsageError(LowDiffError, RuntimeError):
    """A call came at the wrong moment; the message says what to call first."""


class RankLost(LowDiffError, RuntimeError):
    """An exchange of gradients or of the ranks' news failed: another rank ended, or the network did."""

    def __init__(self, why: object) -> None:
        super().__init__(
            "an exchange between ranks failed, most likely because another rank ended: look at its "
            "output, and start all ranks again, as many as there are now; attach resumes from the "
            f"last step that all had committed. The backend says: {why}"
        )


class RanksDiverged(LowDiffError, RuntimeError):
    """Data-parallel ranks are not alike any more, as they must be.

    Attributes:
        step: The step after which it was seen; a write on one rank only is seen within as many steps
            as there are ranks.
        ranks: Those that are not as most ranks are.
        what: What differs.
    """

    def __init__(self, step: int, ranks: Sequence[int], what: str) -> None:
        self.step, self.ranks, self.what = step, tuple(ranks), what
        whose = ", ".join(map(str, ranks))
        super().__init__(
            f"after step {step} rank(s) {whose} differ from the others in {what}. From there on the "
            "ranks train different models, and steps cannot be replayed. Does code follow each "
            "rank's own loss (ReduceLROnPlateau without averaging it over the ranks), or write "
            "parameters on one rank only? Do ranks of tensor parallelism, which must draw the same random "
            "numbers (dropout), have other seeds? If not: unequal processors, or faulty memory. Mend that, "
            "and attach again: training goes on with equal ranks, from no later than this step"
        )


class RunError(LowDiffError):
    """The run folder does not fit what was asked of it."""


class NotARun(RunError):
    """The folder holds no lowdiff run."""

    def __init__(self, path: Path | str, reason: str) -> None:
        self.path = path
        super().__init__(
            f"{path} is not a lowdiff run: {reason}; give the folder or store that was passed to "
            "lowdiff.Checkpointer(...)"
        )


class RunInUse(RunError):
    """Another live trainer holds the run."""

    def __init__(self, path: Path, holder: str, waited_seconds: float) -> None:
        self.path = path
        self.holder = holder
        super().__init__(
            f"run {path} is in use by {holder} (waited {waited_seconds:.0f} s); stop that "
            "trainer, or give this one another run folder"
        )


class RunMismatch(RunError):
    """The run's history belongs to another model or optimizer."""


class StorageError(LowDiffError):
    """Bytes could not be written or read."""


class DamagedFile(StorageError):
    """Bytes were read, but they are not the bytes that were written."""

    def __init__(self, path: Path | str, what: str, *, offset: int | None = None) -> None:
        self.path = Path(path)
        self.what = what
        self.offset = offset
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path} is damaged{where}: {what}; `lowdiff verify` lists what is good")

    @property
    def is_unreadable(self) -> bool:
        """Whether the file is there and could not be read, which may pass: damage does not."""
        cause = self.__cause__
        return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


class OtherFormat(StorageError):
    """The file was written by a lowdiff of another format version."""

    def __init__(self, path: Path | str, found: int, supported: int) -> None:
        self.found = found
        super().__init__(
            f"{path} has format version {found}, this lowdiff reads version {supported} only; recover "
            "with the lowdiff that wrote it, or start a new run folder"
        )


class StoreError(StorageError):
    """An object store did not do what it was asked.

    Attributes:
        is_missing: Whether it answered that there is no such object or bucket.
        is_refused: Whether asking again soon is pointless: no permission, or nothing there.
    """

    def __init__(
        self, url: str, doing: str, why: str, *, is_missing: bool = False, is_refused: bool = False
    ) -> None:
        self.url = url
        self.is_missing = is_missing
        self.is_refused = is_refused
        hint = "; try again once it answers"
        if is_refused:
            hint = (
                "; check the URL, and the credentials in the environment (AWS_ACCESS_KEY_ID, "
                "AWS_ENDPOINT_URL and the like)"
            )
        super().__init__(f"{url}: {doing} failed: {why}{hint}")


class WriterFailed(StorageError):
    """The background writer process reported a failure."""


class RecoveryError(LowDiffError):
    """No consistent state can be rebuilt from what is stored."""


class NotEnoughMemory(RecoveryError):
    """Recovery would need more memory than the processes that recover here may take."""

    def __init__(self, needed_bytes: int, free_bytes: int, num_processes: int = 1) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.num_processes = num_processes
        is_alone = num_processes == 1
        each = f", in each of the {num_processes} processes that recover on this machine at once"
        super().__init__(
            f"recovery needs up to {needed_bytes / 2**20:,.0f} MiB of memory (the states it "
            f"holds, a quarter of them, and 256 MiB{'' if is_alone else each}), and "
            f"{free_bytes / 2**20:,.0f} MiB are free; free some, raise the container's limit, or "
            f"recover on a larger machine{'' if is_alone else ' or with fewer processes'}"
        )


class StepNotFound(RecoveryError):
    """The requested step cannot be rebuilt; says which steps can."""

    def __init__(
        self,
        path: Path | str,
        step: int | None,
        ranges: Sequence[tuple[int, int]],
        why: str,
        *,
        can: str = "recover",
    ) -> None:
        """Say so.

        Args:
            path: The run.
            step: The step; None for the newest.
            ranges: Steps that can be had, ends included.
            why: Why not this one.
            can: What cannot be done with it: ``"recover"`` or ``"pin"``.
        """
        self.path = path
        self.step = step
        self.why = why
        self.recoverable = tuple(ranges)
        done, able = ("pinned", "pinnable") if can == "pin" else ("recovered", "recoverable")
        spans = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in ranges)
        spans = spans or "none; `lowdiff verify` says why"
        what = f"no step of {path} can" if step is None else f"step {step} of {path} cannot"
        super().__init__(f"{what} be {done}: {why}; {able} steps: {spans}")


class ReplayMismatch(RecoveryError):
    """Replayed bits differ from those the live run recorded.

    Attributes:
        step: The first step that does not replay, where that is known.
    """

    def __init__(self, what: str, *, step: int | None = None) -> None:
        self.step = step
        super().__init__(what)
