"""What a run that may be a stranger's could hold, and no run of ours does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lowdiff.errors import DamagedFile, NotARun
from lowdiff.persistence.files.paths import RunFolder


def refuse_strange_entries(folder: RunFolder) -> None:
    """Look for links, pipes and devices among the run's files; there are none of ours.

    A link would lead a reader, and worse a writer, out of the folder; opening a pipe waits for
    ever. So whoever opens a run that may be a stranger's looks first, before it takes a lock.

    Raises:
        DamagedFile: Naming the first one found.
    """
    pending = [
        folder.root / name
        for name in (
            *("run.json", "incarnations", "snapshots", "segments", "constants"),
            *("locks", "pins", "retention.json", "staging", "measurements"),
        )
    ]
    while pending:
        path = pending.pop()
        try:
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                # What most entries are is known from the listing; the rest is looked at above.
                with os.scandir(path) as entries:
                    others = [e.path for e in entries if not e.is_file(follow_symlinks=False)]
                pending += map(Path, others)
        except FileNotFoundError:
            continue  # a live run's retention was faster
        except NotADirectoryError as error:
            raise NotARun(folder.root, "a part of its path is a file") from error
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            what = "it is a link, a pipe or a device, and lowdiff makes none; remove it"
            raise DamagedFile(path, what)
