"""The process that publishes the weights of a run; rank 0's trainer starts it.

``python -m lowdiff.recovery.publish.main SETTINGS``, in a session of its own. It follows the run as anybody may, and the
trainer does not wait for it. Once its trainer is gone it publishes what was committed, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Sequence

import torch

from lowdiff.core.events import Code
from lowdiff.errors import LowDiffError
from lowdiff.persistence.staging.settings import PublisherSettings
from lowdiff.persistence.staging.status import (
    PublisherStatus,
    StatusPage,
    StatusReader,
    TrainerStatus,
    WriterStatus,
    read_status,
)
from lowdiff.recovery.publish.publishing import Publishing
from lowdiff.recovery.replay.optimizers import import_modules, register_again, settle_kernels
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.types import Publisher

_POLL_SECONDS = 0.01
#: Between two looks at a run of which nothing new is heard, or at a target that does not answer.
_LOOK_SECONDS = 0.5
#: How long a target may not answer once the trainer is gone.
_LAST_SECONDS = 60.0
#: So much nicer than training: a version may be late.
_NICE = 5


def _publisher(settings: PublisherSettings) -> Publisher:
    names = None
    if settings.has_names:
        names = json.loads(settings.staging.publisher_names.read_text()).get
    return Publisher(
        settings.target,
        dtype=settings.dtype,
        every=settings.every,
        anchor_every=settings.anchor_every,
        keep_anchors=settings.keep_anchors,
        names=names,
        durable=settings.durable,
    )


def _work(settings: PublisherSettings, page: StatusPage[PublisherStatus]) -> None:
    """Publish until the trainer is gone, and all that it committed is published."""
    reports = _Reports(settings)
    seen, looked_at, gone_at = -2, 0.0, 0.0
    with Publishing(
        settings.run,
        _publisher(settings),
        staging=settings.staging_root,
        options=ReplayOptions(num_workers=1),
        wait_seconds=_LAST_SECONDS,
    ) as publishing:
        while True:
            newest = reports.newest()
            is_gone = bool(gone_at)
            if not is_gone and newest == seen and time.monotonic() - looked_at < _LOOK_SECONDS:
                gone_at = time.monotonic() if _is_trainer_gone(_POLL_SECONDS) else 0.0
                continue
            begun = time.monotonic()
            manifest = publishing.next()
            looked_at = time.monotonic()
            if manifest is not None:
                page.update(
                    version=manifest.version,
                    step=manifest.step,
                    versions=page.status.versions + 1,
                    bytes=page.status.bytes + sum(manifest.parts),
                    seconds=page.status.seconds + looked_at - begun,
                    error="",
                )
                continue
            page.update(error=publishing.error)
            seen = newest
            if is_gone:
                if not publishing.error:
                    return
                if time.monotonic() - gone_at > _LAST_SECONDS:
                    Code.LAST_VERSION_LATE.warn(
                        f"the last steps are not published: {publishing.error}"
                    )
                    return
                time.sleep(_LOOK_SECONDS)


class _Reports:
    """What trainer and writer report of the run."""

    def __init__(self, settings: PublisherSettings) -> None:
        self._is_durable = settings.durable
        self._trainer = StatusReader(settings.staging.trainer_status, TrainerStatus)
        self._writer = StatusReader(settings.staging.status, WriterStatus)

    def newest(self) -> int:
        """Return the newest step that may be published."""
        return self._writer.read().durable_step if self._is_durable else self._trainer.read().step


def _is_trainer_gone(seconds: float) -> bool:
    """Wait a moment for the end of the pipe, which the trainer holds."""
    return bool(select.select([0], [], [], seconds)[0]) and not os.read(0, 1)


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    settings = PublisherSettings.from_json(arguments[0])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    sys.path += [folder for folder in settings.import_path if folder not in sys.path]
    os.nice(_NICE)
    torch.set_num_threads(1)
    settle_kernels()
    path = settings.staging.publisher_status
    page = StatusPage(path, read_status(path, PublisherStatus))
    try:
        import_modules(settings.imports)
        register_again(settings.optimizers, settings.scalar_state)
        _work(settings, page)
    except LowDiffError as error:
        page.update(error=str(error))
        Code.PUBLISHER_ENDED.warn(
            f"the publisher ends: {error}", level=logging.ERROR, exc_info=True
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
