"""The DDP communication hook: from a bucket to the run's reducer and back."""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, known to type checkers
from torch.nn.parallel import DistributedDataParallel

from lowdiff.errors import ConfigError, UnsupportedModel, UsageError
from lowdiff.layout import flat
from lowdiff.protocols import Reducer


class HookState:
    """What `comm_hook` needs; a `Checkpointer` owns one and fills it at ``attach``.

    A copy of the model, deep or pickled, gets an empty one.

    Attributes:
        is_copy: Whether it came with a copy of a model.
        has_exchanged: Whether anything was reduced in the step at hand; who counts steps resets it.
        averaged: Layout indices of what was reduced and not consumed since; who sees it consumed
            takes it out.
    """

    def __init__(self, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        self._reducer: Reducer | None = None
        self._index_of: dict[int, int] = {}
        self.has_exchanged = False
        self.averaged: set[int] = set()

    def __reduce__(self) -> tuple[Callable[[], "HookState"], tuple[()]]:
        return _state_of_a_copy, ()

    def open(self, reducer: Reducer, parameters: Sequence[torch.Tensor]) -> None:
        """Start to reduce for these parameters, in layout order."""
        self._reducer = reducer
        self.has_exchanged = False
        self.averaged.clear()
        self._index_of = {id(parameter): i for i, parameter in enumerate(parameters)}

    def close(self, reducer: Reducer) -> None:
        """Stop, unless another has taken this reducer's place: a hook call after this is an error."""
        if self._reducer is reducer:
            self._reducer = None

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress, exchange and average one bucket."""
        if self._reducer is None:
            raise UsageError(
                "a backward pass ran outside the life of its Checkpointer; call attach(...) "
                "before training, and close() after it"
            )
        if bucket.buffer().layout != torch.strided:
            raise UnsupportedModel(
                "a parameter has sparse gradients, which no compressor takes; build embeddings with "
                "sparse=False"
            )
        parameters = [self._index_of[id(parameter)] for parameter in bucket.parameters()]
        self.has_exchanged = True
        self.averaged.update(parameters)
        with without_autocast(bucket.buffer().device):
            return self._reducer.reduce(
                parameters,
                [flat(gradient) for gradient in bucket.gradients()],
                bucket.buffer(),
            )


def _state_of_a_copy() -> HookState:
    return HookState(is_copy=True)


def autocasts(device: torch.device) -> bool:
    """Whether this thread is inside ``torch.autocast`` for a device."""
    is_known = torch.amp.is_autocast_available(device.type)
    return is_known and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, arithmetic is of the width that is written, also in a user's ``torch.autocast``.

    It would multiply matrices in half width, and refuses to join tensors of the other half.
    """
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook that compresses gradients and remembers what this rank sent.

    ``Checkpointer.attach`` registers it. By hand:
    ``ddp.register_comm_hook(checkpointer.hook_state, lowdiff.comm_hook)``.

    Args:
        state: ``checkpointer.hook_state``.
        bucket: DDP's bucket of gradients; overwritten with the average over ranks.

    Returns:
        Future of the bucket's flat buffer, shape ``[n]``, same dtype and device.

    Raises:
        UsageError: If the checkpointer is not attached.
    """
    return state.reduce(bucket)


def hook_of(ddp: DistributedDataParallel) -> HookState | None:
    """The state of our hook, if that is the one which DDP has."""
    for hook, state in getattr(ddp, "_comm_hooks", []):
        if hook is comm_hook and isinstance(state, HookState):
            return state
    return None


def registered(ddp: DistributedDataParallel, state: HookState) -> HookState:
    """The state that DDP's hook gets: DDP takes one hook for life, perhaps an earlier one of ours."""
    # A copy of a DDP module lists its original's hooks, but its reducer, which is new, has none.
    ddp._comm_hooks = [
        (hook, of_hook)
        for hook, of_hook in getattr(ddp, "_comm_hooks", [])
        if not (isinstance(of_hook, HookState) and of_hook.is_copy)
    ]
    earlier = hook_of(ddp)
    if earlier is not None:
        return earlier
    for hook, _ in getattr(ddp, "_comm_hooks", []):
        raise ConfigError(
            f"the model has the communication hook {getattr(hook, '__name__', hook)!r} already, "
            "and DDP takes one for life; wrap the module anew, and choose lowdiff's compressor"
        )
    ddp.register_comm_hook(state, comm_hook)
    return state
