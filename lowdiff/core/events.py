"""Log lines for people and for machines: a sentence, then ``key=value`` pairs.

::

    lowdiff WARNING LD102: rank 1: checkpoints are not durable now [event=writer_error rank=1 error="..."]

The same pairs are attributes of the ``LogRecord``, so a formatter of the user's may print them as
``%(event)s`` or collect them as JSON. Every warning begins with its code, which is the attribute
``code`` as well. lowdiff configures no logger and no handler.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

#: One logger for all, without a handler; lines are told apart by code and event.
_logger = logging.getLogger("lowdiff")

#: Control and format characters (C0, C1, bidi overrides), line separators, lone surrogates.
_UNPRINTABLE = ("Cc", "Cf", "Zl", "Zp", "Cs")


class Code(Enum):
    """The codes of all warnings. docs/operations.md has one heading each: ``### LD101 staging_removed``.

    A code keeps its meaning for ever; the code of a warning that is gone is not used again.
    """

    # While training: staging memory, disk, writer process.
    STAGING_REMOVED = "LD101"
    WRITER_ERROR = "LD102"
    OTHER_WRITER_ERROR = "LD103"
    STEP_LOST = "LD104"
    STEPS_DROPPED = "LD105"
    WAITING = "LD106"
    SNAPSHOT_PUT_OFF = "LD107"
    WRITER_RESTARTED = "LD108"
    RESTART_FAILED = "LD109"
    STAGING_FULL = "LD110"
    STAGED_RECORD_DAMAGED = "LD111"
    WRITE_FAILED = "LD112"
    SEGMENT_NOT_DURABLE = "LD113"
    STEP_OVERWRITTEN = "LD114"
    ADOPTION_FAILED = "LD115"
    RETENTION_FAILED = "LD116"
    SNAPSHOT_UNREADABLE = "LD117"
    WRITER_ALREADY_RUNS = "LD118"
    RESIDUAL_UNCHECKED = "LD119"
    MEASUREMENTS_INCOMPLETE = "LD120"
    KEPT_STEPS_GIVEN_UP = "LD121"
    # The loop: model, gradients, optimizer, random generators, signals.
    FOREIGN_WRITE = "LD201"
    GRADIENT_CHANGED = "LD202"
    STEP_NEEDS_SNAPSHOT = "LD203"
    LARGE_ITEM = "LD204"
    MEMORY_ORDER_CHANGED = "LD205"
    FROZEN_WRITTEN = "LD206"
    AVERAGE_NOT_REPLAYED = "LD207"
    RANKS_DIVERGED = "LD208"
    LATE_OPTIMIZER_STATE = "LD209"
    GRADIENTS_KEPT = "LD210"
    SEVERAL_SCALERS = "LD211"
    GENERATORS_DRAWN = "LD212"
    GENERATORS_NOT_RESTORED = "LD213"
    PREEMPTED = "LD214"
    SIGNALS_NOT_SEEN = "LD215"
    EPOCH_LEFT = "LD216"
    POSITION_UNUSED = "LD217"
    BATCH_AHEAD = "LD218"
    EPOCH_GOES_ON = "LD219"
    FROZEN_OTHERWISE = "LD220"
    NO_LOCKED_MEMORY = "LD221"
    SNAPSHOT_OVERWRITTEN = "LD222"
    # attach.
    WAITING_FOR_RUN = "LD301"
    EARLIER_CLOSED = "LD302"
    STAGING_TIGHT = "LD303"
    STORE_NOT_ASKED = "LD304"
    STAGING_OF_OTHER_HISTORY = "LD305"
    OLD_WRITER_BUSY = "LD306"
    RESUMED_WITH_CHANGES = "LD307"
    WEIGHTS_NOT_IN_RUN = "LD308"
    OBJECT_NOT_RESTORED = "LD309"
    MODULE_STATE_MISSING = "LD310"
    MODULE_STATE_LEFT_OUT = "LD311"
    RESIDUAL_OF_SNAPSHOT = "LD312"
    RESIDUAL_OLDER = "LD313"
    CHECKPOINT_IGNORED = "LD314"
    STEPS_LOST = "LD315"
    STEPS_PREDICTED = "LD316"
    SCHEDULER_NOT_ATTACHED = "LD317"
    STEPS_LEFT_BEHIND = "LD318"
    BUILT_OTHERWISE = "LD319"
    REPLICA_ON_ACCELERATOR = "LD320"
    FROZEN_FOR_GOOD = "LD321"
    HOOKS_NOT_CALLED = "LD322"
    KERNELS_MISSING = "LD323"
    GRADIENTS_DO_NOT_FIT = "LD324"
    # close and detach.
    LAST_STEP_UNCONFIRMED = "LD401"
    LAST_COMMIT_FAILED = "LD402"
    WRITER_NOT_FINISHED = "LD403"
    STAGING_KEPT = "LD404"
    NO_LAST_SNAPSHOT = "LD405"
    WRITER_STILL_BUSY = "LD406"
    STORE_BEHIND = "LD407"
    WRITER_ENDED_BEFORE = "LD408"
    STEPS_AT_RISK = "LD409"
    # Leases and object stores.
    LEASE_TAKEN_OVER = "LD501"
    LEASE_NOT_RETURNED = "LD502"
    LEASE_NOT_RENEWED = "LD503"
    STORE_ERROR = "LD504"
    STORE_REQUEST_FAILED = "LD505"
    UPLOAD_FAILED = "LD506"
    STORE_OF_OTHER_HISTORY = "LD507"
    UPLOADS_GIVEN_UP = "LD508"
    UPLOADS_ENDED = "LD509"
    STORE_RETENTION_FAILED = "LD510"
    DOWNLOAD_DAMAGED = "LD511"
    # Reading and recovering a run.
    STAGING_UNTRUSTED = "LD601"
    RECORD_DAMAGED = "LD602"
    RUN_DAMAGED = "LD603"
    NEWEST_STEP_LOST = "LD604"
    RECOVERY_WENT_BACK = "LD605"
    REPLAYED_WHOLE = "LD606"
    GENERATORS_MISSING = "LD607"
    EXTRA_STATES_LEFT_OUT = "LD608"
    REPLICA_MEMORY_IN_USE = "LD609"
    FILE_MISREAD = "LD610"
    RUN_WENT_BACK = "LD611"
    VERSION_DAMAGED = "LD612"
    PUBLISH_FAILED = "LD613"
    PUBLISHER_ENDED = "LD614"
    PUBLISHER_RESTARTED = "LD615"
    LAST_VERSION_LATE = "LD616"
    REPLAYED_WITH_OTHER_TORCH = "LD617"
    REPLAYED_ELSEWHERE = "LD618"
    # The replica of a run without a compressor.
    REPLICA_ERROR = "LD701"
    REPLICA_RESTARTED = "LD702"
    REPLICA_STEP_FAILED = "LD703"
    REPLICA_TASK_FAILED = "LD704"
    REPLICA_ALREADY_RUNS = "LD705"
    REPLICA_ENDED = "LD706"
    REPLICA_MEMORY_OUTDATED = "LD707"
    REPLICA_MEMORY_DAMAGED = "LD708"
    # After a failure (strategy survivors).
    SAVED_AFTER_FAILURE = "LD801"
    NOT_SAVED_AFTER_FAILURE = "LD802"
    ITEMS_INHERITED = "LD803"
    HANG_SEEN = "LD804"
    ITEMS_NOT_STAGED = "LD805"
    # Copies in other nodes' memory.
    COPY_SUSPENDED = "LD901"
    RESIDUALS_LEFT_OUT = "LD902"

    @property
    def event(self) -> str:
        """The short name, in snake case."""
        return self.name.lower()

    def warn(
        self,
        text: str | Exception,
        *,
        level: int = logging.WARNING,
        exc_info: bool = False,
        **facts: Any,
    ) -> None:
        """Log a warning as one line: ``LD112: rank 0: No space left [event=write_failed rank=0]``.

        Args:
            text: Finished sentence, or the error that says it; escaped as `printable` does.
            level: ``logging.ERROR`` where a process or a task ends.
            exc_info: Whether to add the traceback of the exception that is handled.
            facts: Numbers, booleans or text, which end the line. Their names become attributes of
                the record, so none may be an attribute of ``logging.LogRecord`` itself. ``rank``
                also stands in front of the text.
        """
        if facts:
            facts = {"event": self.event, **facts}
        extra = {"event": self.event, "code": self.value}
        _log(level, f"{self.value}: ", text, facts, exc_info=exc_info, extra=extra)


def printable(text: str) -> str:
    """Return text of a run as one line without characters that control a terminal.

    Names of parameters, classes and objects, and other libraries' errors, may hold anything.
    Terminals obey some characters, and a new line may imitate a line of lowdiff, so both become
    Python escapes.
    """
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _UNPRINTABLE else c
        for c in text
    )


def inform(text: str, **facts: Any) -> None:
    """Log what is expected, at level INFO; `Code.warn` logs what needs somebody.

    Args:
        text: As for `Code.warn`.
        facts: As for `Code.warn`. ``event`` is the kind of event, in snake case; it never changes.
    """
    _log(logging.INFO, "", text, facts)


def _log(
    level: int,
    code: str,
    text: object,
    facts: Mapping[str, Any],
    *,
    exc_info: bool = False,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> None:
    if _logger.isEnabledFor(level):
        rank = f"rank {facts['rank']}: " if "rank" in facts else ""
        line = code + rank + " ".join(str(text).splitlines())
        if facts:
            line += f" [{' '.join(f'{name}={_quoted(value)}' for name, value in facts.items())}]"
        # Two levels up is the caller, whose line %(lineno)d shall name.
        everything = {**facts, **extra}
        _logger.log(level, "%s", printable(line), exc_info=exc_info, extra=everything, stacklevel=3)


def _quoted(value: Any) -> str:
    """Format the value of ``key=value``: in quotes if it would not be one word."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not set(text) & set(' "[]=')
    return text if plain and text else json.dumps(text)
