"""A CUDA device that only counts: what a step would launch, move and wait for, on a machine that has none.

Inside `CountedDevice` tensors on ``cuda:0`` have shapes, dtypes and places and no values, and tensors on the CPU are what
they always are. So the real code runs, from DDP's hook to the files; operators on the device are tallied, and what the
host would wait for is answered with a fixed value instead: numbers that ascend where positions are expected, zeros else.
Streams, events and generators of `lowdiff.core.devices`, where alone lowdiff asks for them, are stood in for.

What it cannot show: time, what queues behind what, and what only a value decides.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from lowdiff.commit import images
from lowdiff.commit.images import Trailing
from lowdiff.commit.pending import Pending
from lowdiff.core import devices, transforms
from lowdiff.core.sums.plain import ROW
from lowdiff.persistence.format.values import _torch_types

DEVICE = torch.device("cuda:0")
#: The part of a snapshot that is copied beside the next step.
TRAILING = "trailing"
ROOT = Path(__file__).parents[1]
_aten = torch.ops.aten
#: A mode that nothing here enters.
_NO_MODE = torch._C._TorchDispatchModeKey.PROXY

#: Operators that take memory and start nothing.
_ALLOCATES = {
    *(_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default),
    *(_aten.new_empty.default, _aten.new_empty_strided.default, _aten.resize_.default),
}
#: Operators that overwrite what they write, unread, as those with ``out=`` do.
_OVERWRITES = {
    *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor),
    *(_aten._foreach_zero_.default, _aten._foreach_copy_.default, _aten.normal_.default),
}
#: Operators that touch as many elements as they have positions, whatever the size of the rest.
_INDEXED = {
    *(_aten.index_select.default, _aten.index.Tensor, _aten.gather.default, _aten.take.default),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, _aten.index_copy_.default),
    *(_aten.index_add_.default, _aten.index_put_.default, _aten.scatter_.src, _aten.scatter_.value),
}
#: Operators whose answer the host needs before it goes on, and the answer that it gets: nothing overflowed, all is alike.
_ANSWERS = {
    _aten._local_scalar_dense.default: lambda tensor: 0.0 if tensor.is_floating_point() else 1,
    _aten.equal.default: lambda *_: True,
}
#: Operators that only look at their input in another way, though their schema does not say so.
_VIEWS = {_aten._unsafe_view.default, _aten._reshape_alias.default}
#: Operators the size of whose result depends on values: the host waits for it.
_SIZED_BY_VALUES = {_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default}
#: Kernels of an operator over more elements than one block takes, else 1: digits of a radix sort or selection, each
#: with counts and sums (ATen/native/cuda/Sort.cpp and TensorTopK.cu of torch 2.13).
_KERNELS = {
    **dict.fromkeys([_aten.sort.default, _aten.sort.stable, _aten._unique2.default], 10),
    _aten.topk.default: 12,
    **dict.fromkeys([_aten.nonzero.default, _aten.masked_select.default], 3),
}
_ONE_BLOCK_ELEMENTS = 4096
#: Lowdiff's kernel that runs behind the hook, once a bucket.
_COMPARES = "powersgd_compare"


@dataclass
class Tally:
    """What one part of a step did.

    Attributes:
        launches: Kernels and copies that were started.
        num_bytes: Bytes of device memory that they read or write, each operand once.
        link_bytes: Bytes that went over the link to the host or from it.
        waits: Place in the code -> times that the host would have waited there for the device.
        operators: Operator -> times that it was called.
    """

    launches: int = 0
    num_bytes: int = 0
    link_bytes: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)


_await, _put = Pending.finish, Pending.put


class _CountedCopy(devices.Copy):
    """What was begun in an earlier step is here: a forward and a backward pass came in between."""

    def __init__(
        self,
        counted: CountedDevice,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: object = None,
    ) -> None:
        self._counted = None if devices.may_look(sources[0]) else counted
        self._step, self._number = counted.step, counted.copies_begun
        counted.copies_begun += 1
        with nullcontext() if after is None else counted.part(TRAILING):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def hold(self) -> None:
        """See ``Copy``: the host does not wait."""

    @property
    def travels(self) -> bool:
        """See ``Copy``."""
        return self._counted is not None

    def finish(self) -> None:
        """See ``Copy``: only the training is counted; another thread has the time that this takes."""
        counted = self._counted
        if counted is None:
            return
        with counted.arrival:
            if counted.is_counted_here and not self._is_here():
                counted.wait()
                counted.copies_done = self._number + 1  # one stream copies them in their order
            counted.arrival.wait_for(self._is_here)

    def _is_here(self) -> bool:
        assert self._counted is not None
        return self._counted.step > self._step or self._counted.copies_done > self._number


class _HeldTrail(devices.Trail):
    """Is copied when it is held, by the thread that trains: forward and backward passes take no time here.

    So counts do not go by chance, and the other thread, for which there is no device, touches no tensor of it.
    """

    def arrived(self) -> list[torch.Tensor]:
        """See ``Trail``."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_held)
        return super().arrived()


class _NumberedFetch(devices.Fetch):
    """Returns numbers for integers, which may be positions."""

    def arrived(self) -> list[torch.Tensor]:
        """See ``Fetch``."""
        return [
            torch.arange(values.numel(), dtype=values.dtype)
            if values.dtype == torch.int64
            else values
            for values in super().arrived()
        ]


class CountedDevice(TorchDispatchMode):
    """Counts operators on ``cuda:0`` while it is entered; for one thread.

    Args:
        kernel_bytes: What each of lowdiff's own kernels reads and writes per element of a bucket, as
            `benches.kernel_bytes` measures it: of their operands they touch a part.

    Attributes:
        parts: Name of a part -> its tally; what belongs to no part is under "".
        step: How often the tallies were begun anew.
        copies_begun: Of copies to the host.
        copies_done: How many of these are done, the oldest first.
    """

    def __init__(self, kernel_bytes: Mapping[str, float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kernel_bytes = Counter[str]()
        for name, per_element in (kernel_bytes or {}).items():
            key = name if name == _COMPARES else name.partition("_")[0]
            self._kernel_bytes[key] += per_element  # type: ignore[assignment]
        #: Of a bucket, by the table of its matrices.
        self._elements: dict[int, int] = {}
        self.parts: dict[str, Tally] = {}
        self.step = self.copies_begun = self.copies_done = 0
        #: Notified when copies may be here.
        self.arrival = threading.Condition()
        self._thread = threading.get_ident()
        #: Of each piece of work that was left to another thread: to which, and the step.
        self._put: list[tuple[int, int]] = []
        self._part = ""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: set[int] = set()
        self._entered: ExitStack | None = None

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            entered.enter_context(mock.patch.multiple(devices, **self._stand_ins()))
            waiting = lambda *given, **named: self._await(*given, **named)
            entered.enter_context(mock.patch.object(Pending, "finish", waiting))
            putting = lambda *given: self._note_put(*given)
            entered.enter_context(mock.patch.object(Pending, "put", putting))
            # What is copied has no values.
            entered.enter_context(mock.patch.object(Trailing, "changed", return_value=[]))
            entered.enter_context(mock.patch.object(images, "_READABLE", (FakeTensor,)))
            # Here a fake tensor is one of the device, and stands for no other.
            entered.enter_context(mock.patch.object(transforms, "_FAKE", _NO_MODE))
            # Its own asks for one element after the other.
            tolist = mock.patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist())
            entered.enter_context(tolist)
            synchronize = mock.patch.object(torch.accelerator, "synchronize", self.wait)
            entered.enter_context(synchronize)
            stored = _torch_types()
            entered.enter_context(mock.patch.dict(stored, {FakeTensor: stored[torch.Tensor]}))
            entered.enter_context(_WithoutDriver())
            # Under it torch does not look for a driver when a device is named.
            entered.enter_context(self._fake)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._pass()
        assert self._entered is not None
        self._entered.close()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Tally what runs inside under a name; an inner part's is not the outer one's."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def reset(self) -> None:
        """Begin all tallies anew, of another step."""
        self.parts = {}
        self._pass()

    def _pass(self) -> None:
        """A step has gone by: what was begun in it is here."""
        with self.arrival:
            self.step += 1
            self.arrival.notify_all()

    @property
    def is_counted_here(self) -> bool:
        """Whether this is the thread that trains."""
        return threading.get_ident() == self._thread

    def _await(
        self,
        pending: Pending,
        is_enough: Callable[[], bool] | None = None,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Count that the host waits for work of this very step, before it does."""
        is_new = (id(pending), self.step) in self._put
        if self.is_counted_here and is_new and is_enough is None:
            self.wait()
            with self.arrival:
                self.copies_done = self.copies_begun
                self.arrival.notify_all()
        return _await(pending, is_enough, timeout_seconds)

    def _note_put(self, pending: Pending, *work: Any) -> None:
        self._put.append((id(pending), self.step))
        _put(pending, *work)

    @property
    def _tally(self) -> Tally:
        return self.parts.setdefault(self._part, Tally())

    def _stand_ins(self) -> dict[str, Any]:
        state = torch.zeros(16, dtype=torch.uint8)
        stream = mock.Mock(synchronize=self.wait, stream_id=0)
        return {
            "is_capturing": lambda _: False,
            "name_of": lambda _: "counted",
            "generator_of": lambda _: (lambda: state, lambda _: None),
            "future_on": lambda _: torch.futures.Future(),
            "copy": partial(_CountedCopy, self),
            "fetch": _NumberedFetch,
            "Trail": _HeldTrail,
            "aside": lambda _: nullcontext(),
            "stream_of": lambda _: stream,
        }

    def wait(self, *_: object) -> None:
        """Count that the host waits."""
        self._tally.waits[_place()] += 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator: on the device as a shape, on the CPU as it is."""
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(x, FakeTensor) or _names_it(x) for x in leaves):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func in _ANSWERS:
            self._count(func, args, kwargs, [])
            self.wait()
            return _ANSWERS[func](*args)
        is_awaited = not _flag(func, args, kwargs, "non_blocking")
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            self._tally.operators[str(func)] += 1
            self._to_host(args[0], is_awaited=is_awaited or not self._is_pinned(args[0]))
            return args[0]
        if func in _SIZED_BY_VALUES or _is_masked(func, args):
            self.wait()
        if func in _SIZED_BY_VALUES or (func is _aten.index.Tensor and _is_masked(func, args)):
            out = _all_of(func, args)
        else:
            with self._fake:
                out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and out.fake_device.type == "cpu":
            return self._at_home(func, out, is_pinned=is_pinned, is_awaited=is_awaited)
        self._count(func, args, kwargs, tree_leaves(out))
        if func in (_aten._to_copy.default, _aten.copy_.default):
            source = args[1] if func is _aten.copy_.default else args[0]
            if not isinstance(source, FakeTensor):
                self._tally.link_bytes += source.nbytes
                if is_awaited:
                    self.wait()
        return out

    def _at_home(
        self, func: Any, value: FakeTensor, *, is_pinned: bool, is_awaited: bool
    ) -> torch.Tensor:
        """Return a result that lies on the CPU as a tensor with values."""
        with _disable_current_modes():
            host = torch.empty(value.shape, dtype=value.dtype)
        self._tally.operators[str(func)] += 1
        # Where nobody waits for a copy, torch takes page-locked memory for it.
        if is_pinned or not is_awaited:
            storage = host.untyped_storage()
            self._pinned.add(storage._cdata)
            weakref.finalize(host, self._pinned.discard, storage._cdata)
        if func not in _ALLOCATES:
            self._to_host(host, is_awaited=is_awaited)
        return host

    def _is_pinned(self, host: torch.Tensor) -> bool:
        return host.untyped_storage()._cdata in self._pinned

    def _to_host(self, host: torch.Tensor, *, is_awaited: bool) -> None:
        """Fill a tensor of the host as a copy from the device would; one into ordinary memory is always waited for."""
        tally = self._tally
        tally.launches += 1
        tally.num_bytes += host.nbytes
        tally.link_bytes += host.nbytes
        if is_awaited:
            self.wait()
        with _disable_current_modes():
            if host.dtype in (torch.int32, torch.int64):
                flat = torch.arange(host.numel(), dtype=host.dtype)
                host.copy_(flat.view(host.shape))
            else:
                host.zero_()

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Any]
    ) -> None:
        tally = self._tally
        tally.operators[str(func)] += 1
        if func in _ALLOCATES or func in _VIEWS or _is_view(func):
            return
        if func.namespace == "lowdiff":
            tally.launches += 1
            name = func._schema.name.partition("::")[2]
            named = dict(zip([a.name for a in func._schema.arguments], args, strict=True))
            if name == "powersgd_project":
                self._elements[id(named["table"])] = named["bucket"].numel()
            if name == _COMPARES:
                tally.num_bytes += round(
                    self._kernel_bytes[name] * self._elements[id(named["table"])]
                )
            if name == "sum_words":  # a program's last rows may be fewer
                tally.num_bytes += named["table"].shape[1] * named["rows"] * 4 * ROW
            elif name == "consumed_search":
                tally.num_bytes += named["table"].shape[1] * named["block"] * named["width"]
            elif name.startswith("consumed_"):
                tally.num_bytes += named["positions"].numel() * (4 + 2 * named["width"])
            if name in ("topk_add_up", "powersgd_project"):  # once a bucket, for all of its kernels
                tally.num_bytes += round(
                    self._kernel_bytes[name.partition("_")[0]] * args[0].numel()
                )
            return
        read, written = _operands(func, args, kwargs)
        known = {id(x) for x in (*read, *written)}
        written += [x for x in outs if isinstance(x, FakeTensor) and id(x) not in known]
        most = max((x.numel() for x in (*read, *written)), default=0)
        tally.launches += _KERNELS.get(func, 1) if most > _ONE_BLOCK_ELEMENTS else 1
        if func in _INDEXED and not _is_masked(func, args):
            positions = [x for x in read if x.dtype in (torch.int64, torch.int32)]
            values = [x for x in (*written, *read) if x.dtype not in (torch.int64, torch.int32)]
            count = max((x.numel() for x in positions), default=0)
            width = max((x.element_size() for x in values), default=0)
            tally.num_bytes += count * (8 + 2 * width)
            return
        tally.num_bytes += sum(x.nbytes for x in (*read, *written))


class _WithoutDriver(TorchFunctionMode):
    """Goes straight to the operators where torch asks for a driver before."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if args and isinstance(args[0], FakeTensor) and func in _WITHOUT_DRIVER:
            return _WITHOUT_DRIVER[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _part_of(tensor: torch.Tensor, key: Any) -> torch.Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    dim = 0
    for one in keys:
        if isinstance(one, int):
            tensor = _aten.select.int(tensor, dim, one)
            continue
        if one is None:
            tensor = _aten.unsqueeze.default(tensor, dim)
        elif isinstance(one, slice):
            start, stop, step = one.indices(tensor.shape[dim])
            tensor = _aten.slice.Tensor(tensor, dim, start, stop, step)
        elif isinstance(one, torch.Tensor):
            tensor = _aten.index.Tensor(tensor, [None] * dim + [one])
        else:
            raise NotImplementedError(f"a key {one!r} of a tensor on the counted device")
        dim += 1
    return tensor


def _set_part_of(tensor: torch.Tensor, key: Any, value: Any) -> None:
    if isinstance(key, torch.Tensor):
        is_tensor = isinstance(value, torch.Tensor)
        values = value if is_tensor else torch.full((), value, dtype=tensor.dtype, device=DEVICE)
        _aten.index_put_.default(tensor, [key], values)
        return
    part = _part_of(tensor, key)
    _aten.copy_.default(part, value) if isinstance(value, torch.Tensor) else part.fill_(value)


def _names_it(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor would begin: storages do not overlap."""
    storage = tensor.untyped_storage()
    # Within 63 bits, as an address is.
    place = (storage._cdata >> 4) % (1 << 26)
    address: int = (place << 36) + tensor.storage_offset() * tensor.element_size()
    return address


#: What asks for a driver on its way to the operator -> what does not.
_WITHOUT_DRIVER: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _part_of,
    torch.Tensor.__setitem__: _set_part_of,
    torch.Tensor.copy_: _aten.copy_.default,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.numpy: lambda tensor, **_: tensor.detach().cpu().numpy(),
    torch.Tensor.__float__: lambda tensor: float(tensor.item()),
    torch.Tensor.__int__: lambda tensor: int(tensor.item()),
    torch.Tensor.nonzero: _aten.nonzero.default,
    torch.nonzero: _aten.nonzero.default,
}


def _operands(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[FakeTensor], list[FakeTensor]]:
    """Return what an operator reads and what it writes, each tensor once."""
    read: dict[int, FakeTensor] = {}
    written: dict[int, FakeTensor] = {}
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = {id(x): x for x in tree_leaves(value) if isinstance(x, FakeTensor)}
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written |= tensors
        if not (is_written and (func in _OVERWRITES or argument.name.startswith("out"))):
            read |= tensors
    return list(read.values()), list(written.values())


def _flag(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> bool:
    """Return an argument of an operator, wherever it stands."""
    names = [argument.name for argument in func._schema.arguments]
    if name not in names:
        return False
    place = names.index(name)
    return bool(args[place] if len(args) > place else kwargs.get(name, False))


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its input in another way."""
    returned = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _is_masked(func: Any, args: Sequence[Any]) -> bool:
    """Whether elements are chosen by a mask, whose number of ones the host needs."""
    return func in (_aten.index.Tensor, _aten.index_put_.default) and any(
        isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in args[1]
    )


def _all_of(func: Any, args: Sequence[Any]) -> Any:
    """Return what an operator whose result's size depends on values returns if it takes all elements."""
    tensor = args[0]
    if func is _aten.nonzero.default:
        return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64, device=DEVICE)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=DEVICE)
    return (flat, flat, flat) if func is _aten._unique2.default else flat


def _place() -> str:
    """File and line of the product that is running, or of whatever else called an operator."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
