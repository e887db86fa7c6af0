"""The DDP communication hook: from a bucket to the run's reducer and back.

What it shares with FSDP's hook, which module `fsdp_hook` has, is the `HookState`.
"""

# No postponed annotations here: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, known to type checkers
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lowdiff.compressors.collectives import completed
from lowdiff.core.layout import flat
from lowdiff.core.transforms import inside
from lowdiff.errors import ConfigError, LowDiffError, RankLost, UnsupportedModel, UsageError
from lowdiff.protocols import Reducer

#: Averages a bucket over the ranks, in place.
Average = Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]

_OUTSIDE = (
    "a backward pass ran outside the life of its Checkpointer; call attach(...) before training, and "
    "close() after it"
)


class Exchanges(Protocol):
    """Hears when gradients are exchanged."""

    def began(self) -> None:
        """Note that an exchange begins."""
        ...

    def ended(self) -> None:
        """Note that an exchange ended; on whichever thread ends it."""
        ...


class HookState:
    """State that `comm_hook` needs; a `Checkpointer` owns one and fills it at ``attach``.

    A copy of the model, deep or pickled, gets an empty one.

    Attributes:
        is_copy: Whether it came with a copy of a model.
        has_failed: Whether the last backward pass failed, so that its gradients mean nothing.
    """

    def __init__(self, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        self._why_closed = _OUTSIDE
        self._reducer: Reducer | None = None
        self._average: Average | None = None
        self._exchanges: Exchanges | None = None
        self._ddp: DistributedDataParallel | None = None
        self._index_of: dict[int, int] = {}
        #: Layout indices of parameters whose gradients were averaged and not consumed since.
        self._exchanged: set[int] = set()
        self.has_failed = False
        self._failure: Exception | None = None

    def __reduce__(self) -> tuple[Callable[[], "HookState"], tuple[()]]:
        return partial(HookState, is_copy=True), ()

    def open(
        self,
        reducer: Reducer,
        parameters: Sequence[torch.Tensor],
        *,
        indices: Sequence[int] | None = None,
        average: Average | None = None,
        exchanges: Exchanges | None = None,
        ddp: DistributedDataParallel | None = None,
    ) -> None:
        """Start to reduce for some parameters.

        Args:
            reducer: Reduces what the hook gets.
            parameters: In layout order.
            indices: Layout index of each; None where they are the whole layout.
            average: Averages instead of the reducer, which then only reads what optimizers consume.
            exchanges: Is told when each exchange begins and ends.
            ddp: Whose hook calls, if it is DDP's.
        """
        self._reducer = reducer
        self._exchanges = exchanges
        self._ddp = ddp
        self._average = average
        self._why_closed = _OUTSIDE
        self.has_failed = False
        self._exchanged.clear()
        places = range(len(parameters)) if indices is None else indices
        self._index_of = {id(p): i for i, p in zip(places, parameters, strict=True)}

    def close(self, reducer: Reducer) -> None:
        """Stop, unless another has taken this reducer's place: a hook call after this is an error."""
        if self._reducer is reducer:
            self._reducer = self._average = self._exchanges = self._ddp = None

    def detach(self, average: Average) -> None:
        """Average buckets from now on, and remember nothing: DDP keeps its hook for life."""
        self._reducer, self._average = None, average
        self._exchanges = self._ddp = None
        self.has_failed = False
        self._exchanged.clear()

    def consume(self, parameters: Collection[int]) -> set[int]:
        """Take out what an optimizer consumes; returns the parameters that were not averaged."""
        own = set(parameters) - self._exchanged
        self._exchanged -= set(parameters)
        return own

    def leave(self, why: str) -> None:
        """Stop without giving anything back, in a process that only got a copy of what is open."""
        self._reducer = self._average = self._exchanges = self._ddp = None
        self._why_closed = why

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Compress, exchange and average one bucket.

        DDP hears of no error: it would make a RuntimeError of what a future failed with, and does
        not work any more after a hook that raised. The first error is raised when DDP is done with
        the backward pass, so that ``backward()`` raises it as it is.
        """
        if torch._C._current_graph_task_id() == -1:
            return self._reduce(bucket)  # by ddp.join(), in whose call no callback can be queued
        if bucket.index() == 0:
            self._failure = None  # of a pass that the user's code broke off
            self.has_failed = False
        if bucket.is_last():
            # Twice, because the callback in which DDP writes its averages is queued after this call.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._raise_failure))
        buffer, exchanges = bucket.buffer(), self._exchanges
        if exchanges is not None:
            exchanges.began()
        try:
            future = self._reduce(bucket)
        except Exception as error:  # noqa: BLE001  raised when DDP is done
            self._fail(error)
            if exchanges is not None:
                exchanges.ended()
            return completed(buffer)
        return future.then(partial(self._settled, buffer, exchanges))

    def _settled(
        self,
        buffer: torch.Tensor,
        exchanges: Exchanges | None,
        done: torch.futures.Future[torch.Tensor],
    ) -> torch.Tensor:
        """Return what DDP gets; on whichever thread ends the exchange."""
        if exchanges is not None:
            exchanges.ended()
        try:
            return done.value()
        except (LowDiffError, torch.OutOfMemoryError) as error:
            self._fail(error)
        except RuntimeError as error:  # the backend's
            lost = RankLost(error)
            lost.__cause__ = error
            self._fail(lost)
        except Exception as error:  # noqa: BLE001  raised when DDP is done
            self._fail(error)
        return buffer

    def _fail(self, error: Exception) -> None:
        # Buckets settle in order, and what follows a failure says less.
        if self._failure is None:
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self.has_failed = True
            raise failure

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._refuse_closed()
        if self._reducer is None:
            return self.exchange((), (), bucket.buffer())
        if self._ddp is not None:
            _refuse_join(self._ddp)
        if bucket.buffer().layout != torch.strided:
            raise UnsupportedModel(
                "a parameter has sparse gradients, which no compressor takes; build embeddings with "
                "sparse=False"
            )
        gradients = [flat(gradient) for gradient in bucket.gradients()]
        return self.exchange(bucket.parameters(), gradients, bucket.buffer())

    def _refuse_closed(self) -> None:
        if self._reducer is None and self._average is None:
            raise UsageError(self._why_closed)

    def exchange(
        self,
        parameters: Iterable[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the gradients of some parameters over the ranks, in place.

        Args:
            parameters: As in the model.
            gradients: Of each, a flat view into the buffer; not looked at where no reducer takes them.
            buffer: Flat; its elements between the gradients are of no meaning.

        Returns:
            Future of the buffer.

        Raises:
            UsageError: If no Checkpointer is attached.
        """
        self._refuse_closed()
        if self._reducer is None:
            assert self._average is not None
            return self._average(buffer)
        if where := inside(buffer.device):
            raise UsageError(
                f"gradients are exchanged inside {where}, which repeats the exchange without lowdiff; run "
                "the backward pass outside"
            )
        try:
            indices = [self._index_of[id(parameter)] for parameter in parameters]
        except KeyError as error:
            raise UsageError(
                "backward() made the gradient of a parameter that no optimizer had at attach; replace, "
                "freeze and unfreeze parameters before attach"
            ) from error
        self._exchanged.update(indices)
        if self._average is not None:
            return self._average(buffer)
        with without_autocast(buffer.device):
            return self._reducer.reduce(indices, gradients, buffer)


def _refuse_join(ddp: DistributedDataParallel) -> None:
    """Refuse a loop in which a rank may make steps that others do not make.

    DDP keeps the mark of a ``Join`` also after its with block.
    """
    join = ddp._join_config
    is_alone = ddp.process_group.size() == 1
    if join.enable and not (join.throw_on_early_termination or is_alone):
        raise UsageError(
            "the loop runs inside torch's Join (ddp.join(), accelerator.join_uneven_inputs), where ranks that "
            "have no batch left stop and the others go on. A step counts only if all ranks commit it, so the others "
            "would wait for those. Give every rank the same number of batches, as DistributedSampler does, or end "
            "all ranks with the first one: ddp.join(throw_on_early_termination=True). Of a Join that is over, "
            "ddp.join(enable=False) takes the mark away"
        )


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
