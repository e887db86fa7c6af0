"""Differential checkpointing for PyTorch: every step saved, any step back.

Names load on first use, so that the command line and the writer process, which both import this
package, start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lowdiff.version import __version__ as __version__

if TYPE_CHECKING:
    from lowdiff.checkpointer import Checkpointer
    from lowdiff.errors import LowDiffError
    from lowdiff.persistence.versions.subscriber import Subscriber
    from lowdiff.recovery import RecoveredState, recover, register_optimizer
    from lowdiff.step.ddp_hook import comm_hook
    from lowdiff.tuner import Limits, Tuning
    from lowdiff.types import Publisher, Retention

__all__ = [
    "Checkpointer",
    "Limits",
    "LowDiffError",
    "Publisher",
    "RecoveredState",
    "Retention",
    "Subscriber",
    "Tuning",
    "comm_hook",
    "recover",
    "register_optimizer",
]

_HOMES = {
    "Checkpointer": "lowdiff.checkpointer",
    "Limits": "lowdiff.tuner",
    "LowDiffError": "lowdiff.errors",
    "Publisher": "lowdiff.types",
    "RecoveredState": "lowdiff.recovery",
    "Retention": "lowdiff.types",
    "Subscriber": "lowdiff.persistence.versions.subscriber",
    "Tuning": "lowdiff.tuner",
    "comm_hook": "lowdiff.step.ddp_hook",
    "recover": "lowdiff.recovery",
    "register_optimizer": "lowdiff.recovery",
}

# Hidden from type checkers, which would otherwise accept any name at all.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
