"""What every forked process of a test has loaded: see ``tests.background``. None of it starts a thread."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import torch._dynamo  # the first optimizer of a process loads it
import torch.nn.parallel

import lowdiff.checkpointer
import lowdiff.persistence.writer.main
import lowdiff.recovery.engine
import lowdiff.recovery.replica.main
import tests.crash.all_trainings
import tests.loops.lives

# Collections of garbage pass over what is loaded: to look at all of torch takes them a fifth of a
# second, and would copy its memory into each process.
gc.collect()
gc.freeze()
