"""Every training there is, registered and sorted by what makes it one of its own."""

from __future__ import annotations

from tests.crash import averaged_trainings, loop_trainings, model_trainings, optimizer_trainings
from tests.crash.trainings import TRAININGS

__all__ = ["AVERAGED", "PLAIN", "REAL", "TRAININGS"]

_REAL = {m.__name__ for m in (loop_trainings, model_trainings, optimizer_trainings)}

#: Trainings as people really write them.
REAL = frozenset(name for name, build in TRAININGS.items() if build.__module__ in _REAL)
#: Those with an average of the weights.
AVERAGED = frozenset(
    name for name, build in TRAININGS.items() if build.__module__ == averaged_trainings.__name__
)
#: Those without DDP.
PLAIN = frozenset({"plain_module", "gan_without_ddp"})
