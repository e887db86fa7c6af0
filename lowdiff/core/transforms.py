"""Whether hooks may act: not where PyTorch takes the calls apart instead of doing them.

Inside a transform of ``torch.func``, a trace, a fake mode or the capture of a CUDA graph a tensor stands for others, and
a call is noted to be repeated later without any hook. What a hook of lowdiff does belongs to none of it. Every such
hook asks here first: one that can wait acts at the next call outside, any other refuses by name.
"""

from __future__ import annotations

import torch
from torch.fx import _symbolic_trace

from lowdiff.core import devices

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def inside(device: torch.device) -> str:
    """Return what takes the present call apart, for messages; empty where a hook may act.

    Modes that only watch what is done, as counters of operations are, do not count.

    Args:
        device: Where the model lives.
    """
    # First: while torch.compile traces this, it sees nothing behind it.
    if torch.compiler.is_compiling():
        return "torch.compile or torch.export"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func"
    if torch._C._is_tracing():
        return "torch.jit.trace"
    if _symbolic_trace._is_fx_tracing_flag:  # what asks for it has other names in other versions
        return "a trace of torch.fx"
    if torch._C._get_dispatch_mode(_FAKE) is not None:
        return "a FakeTensorMode"
    if devices.is_capturing(device):
        return "the capture of a CUDA graph"
    return ""
