"""``lowdiff inspect --watch``: how far a run is, refreshed until Ctrl-C."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lowdiff.persistence.paths import RunFolder, staging_to_read
from lowdiff.persistence.progress import RankProgress, RunProgress, RunWatch
from lowdiff.terminal import plain_console, print_json

if TYPE_CHECKING:
    from rich.table import Table


def watch(run: Path, staging: Path | None, *, as_json: bool, every_seconds: float) -> None:
    """Show a run until Ctrl-C, which is the way to end it and no error.

    Raises:
        NotARun: If the folder holds no run.
    """
    looks = RunWatch(RunFolder(run), staging_to_read(staging))
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            while True:
                print_json(looks.look(time.time()).document(), indent=None)
                time.sleep(every_seconds)
        from rich.live import Live

        plain = plain_console()
        with Live(_table(run, looks.look(time.time())), console=plain, auto_refresh=False) as live:
            while True:
                time.sleep(every_seconds)
                live.update(_table(run, looks.look(time.time())), refresh=True)


def _table(run: Path, progress: RunProgress) -> Table:
    from rich import box
    from rich.filesize import decimal
    from rich.table import Table

    life = "no incarnation yet"
    if progress.incarnation is not None:
        life = f"incarnation {progress.incarnation}"
    table = Table(
        title=f"{run}: {life}",
        title_justify="left",
        caption=f"committed {_step(progress.committed_step)}, durable "
        f"{_step(progress.durable_step)}, lag {_step(progress.lag_steps)}, "
        f"{decimal(progress.disk_bytes)} on disk; Ctrl-C ends",
        caption_justify="left",
        box=box.SIMPLE,
    )
    for name in ("rank", "trainer", "staged", "durable", "lag", "snapshot", "on disk"):
        table.add_column(name, justify="right")
    table.add_column("writer", overflow="fold")
    for rank in progress.ranks:
        table.add_row(
            str(rank.rank),
            _trainer(rank),
            _step(rank.staged_step),
            _step(rank.durable_step),
            _lag(rank),
            "none" if rank.durable_snapshot < 0 else str(rank.durable_snapshot),
            decimal(rank.disk_bytes),
            rank.error or "ok",
            style="red" if rank.error else None,
        )
    return table


def _trainer(rank: RankProgress) -> str:
    told = ", preempted" if rank.preempted else ""
    age = "" if rank.commit_age_seconds is None else f", {rank.commit_age_seconds:.0f} s ago"
    return f"{rank.trainer}{told}{age}"


def _lag(rank: RankProgress) -> str:
    if rank.staged_step is None or rank.durable_step is None:
        return "?"
    return str(max(0, rank.staged_step - rank.durable_step))


def _step(step: int | None) -> str:
    return "?" if step is None else str(step)
