"""Where tensors live, and what the host does for those that live on an accelerator.

Whoever wants to know asks here and nowhere else, through the module: ``devices.may_look(tensor)``. So a count of
what a step costs on an accelerator can put itself in this place on a machine without one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from lowdiff.core.events import Code
from lowdiff.core.layout import flat
from lowdiff.errors import StorageError

#: Reads the state of a device's random generator, and sets it.
Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]


def may_look(at: torch.Tensor | torch.device) -> bool:
    """Whether the host may read values there: on an accelerator it would wait for all that is queued."""
    device = at.device if isinstance(at, torch.Tensor) else at
    return device.type == "cpu"


def comes_late(at: torch.Tensor | torch.device) -> bool:
    """Whether what a step reads there is copied to the host behind the step, which does not wait for it."""
    device = at.device if isinstance(at, torch.Tensor) else at
    return not may_look(device) and device.type != "meta"


def sums_there(device: torch.device) -> bool:
    """Whether checksums of what lies on a device are taken there, see `lowdiff.core.sums`, and read late.

    On a CPU a CRC-32C is faster, and says at once what was written.
    """
    return not may_look(device)


def copies_beside(device: torch.device) -> bool:
    """Whether a device can copy to the host beside its other work, see `Trail`; else each copy comes in its turn."""
    return device.type == "cuda"


def takes_whole_buckets(device: torch.device) -> bool:
    """Whether gradients are compressed bucket by bucket, in a fixed number of kernels.

    On a CPU there is nothing to launch, and what is read parameter by parameter stays in its cache.
    """
    return device.type == "cuda"


def compiles_kernels(device: torch.device) -> bool:
    """Whether Triton makes kernels for a device."""
    return device.type == "cuda"


def name_of(device: torch.device) -> str:
    """What a device is called where records tell whose arithmetic they hold."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def generator_of(device: torch.device) -> Generator | None:
    """Return what reads and sets the global random generator of a device; None of the host's, which is torch's own."""
    if device.type != "cuda":
        return None
    return (
        lambda: torch.cuda.get_rng_state(device),
        lambda state: torch.cuda.set_rng_state(state, device),
    )


def place_of(tensor: torch.Tensor) -> str:
    """Return the device where a tensor belongs: its own, or that of the tensor of which it is a copy on the host."""
    return getattr(tensor, _PLACE, None) or str(tensor.device)


def belonging(host: torch.Tensor, place: str) -> torch.Tensor:
    """Mark a copy on the host with the place of its original; returns the copy."""
    if place != place_of(host):
        setattr(host, _PLACE, place)
    return host


def put_back(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor that belongs on an accelerator on a device, which may be another one, and any other as it is."""
    return tensor if place_of(tensor) == "cpu" else tensor.to(device)


#: Attribute of a copy on the host: a record says where a tensor was, and recovery reads it on the CPU.
_PLACE = "lowdiff_place"


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """Return a future of something on a device.

    It must know an accelerator: only then does a waiting caller also wait for work that is still queued there.
    """
    return torch.futures.Future(devices=None if may_look(device) else [device])


def mark(device: torch.device) -> torch.Event | None:
    """Return a mark behind what this thread has queued on a device so far; see `follow`. None where nothing is queued."""
    return None if device.type != "cuda" else stream_of(device).record_event()


def follow(mark: torch.Event | None) -> None:
    """Have what this thread queues from now on run behind a mark of another stream; the host does not wait."""
    if mark is not None:
        stream_of(mark.device).wait_event(mark)


def go_first(stream: torch.Stream | None) -> None:
    """Have what is queued on another stream from now on run behind what this thread has queued; the host does not wait."""
    if stream is not None and stream != stream_of(stream.device):
        stream.wait_event(stream_of(stream.device).record_event())


def settle(device: torch.device) -> None:
    """Wait until nothing is queued on a device any more, on any stream."""
    if not may_look(device):
        torch.accelerator.synchronize(device)


def aside(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what is queued on a device does not wait for what this thread queued before."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def chosen(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a device is the current one, on which kernels are launched that do not say where."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def queue_of(device: torch.device) -> int:
    """Return a number of the stream that `stream_of` returns: what two of them queue has no order."""
    return int(stream_of(device).stream_id) if device.type == "cuda" else 0


def stream_of(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread queues what it has a device do."""
    return torch.cuda.current_stream(device)


def is_capturing(device: torch.device) -> bool:
    """Whether what this thread queues on a device is captured for a CUDA graph, and not done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Copy:
    """Tensors of one device on their way into memory of the host that is there already.

    On CUDA a stream of its own copies them, behind what was queued before; nothing that is queued later on another
    stream waits for it. Their owner may free them, and must not overwrite them before it is done; see `hold`.

    Args:
        targets: On the host.
        sources: On one device.
        after: What they are copied behind; None: all that this thread has queued there. See `mark`.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        after: torch.Event | None = None,
    ) -> None:
        self._event: torch.cuda.Event | None = None
        self._device = sources[0].device
        if self._device.type != "cuda":
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return
        stream = _copying(self._device, trails=after is not None)
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)
        # Blocking: a thread that waits for it leaves its core to others.
        self._event = stream.record_event(torch.cuda.Event(blocking=True))

    @property
    def travels(self) -> bool:
        """Whether it takes its time: on the host it was here at once."""
        return self._event is not None

    def hold(self) -> None:
        """Have the device do what is queued from now on when it is done: the host goes on, and may have it overwritten."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        """Wait until it is here.

        Raises:
            StorageError: If the device fails meanwhile.
        """
        try:
            if self._event is not None:
                self._event.synchronize()
        except RuntimeError as error:
            raise StorageError(
                f"{self._device} failed while a step was copied from it ({error}); nothing of that step counts: end "
                "this process, and attach in a new one goes on from the last committed step"
            ) from error


@cache
def _copying(device: torch.device, *, trails: bool) -> torch.cuda.Stream:
    """Return the stream that copies off a device; another one for what trails, so that no step waits behind it."""
    return torch.cuda.Stream(device)


def copy(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    after: torch.Event | None = None,
) -> Copy:
    """Begin to copy tensors of one device into host memory, whose pages should be locked: else the host waits.

    Args:
        targets: See `Copy`.
        sources: See `Copy`.
        after: See `Copy`.
    """
    return Copy(targets, sources, after)


def _host_memory(like: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of a tensor; of an accelerator's, PyTorch keeps the pages locked for later.

    On an H200 a copy into fresh pages, as ``Tensor.cpu`` makes it, reached a fiftieth of the link's speed.
    """
    with torch.inference_mode(False):  # another thread writes to it
        return _empty_on_host(like)


def _empty_on_host(like: torch.Tensor) -> torch.Tensor:
    if like.device.type != "cuda":
        return torch.empty_like(like, device="cpu")
    try:
        return torch.empty_like(like, device="cpu", pin_memory=True)
    except RuntimeError as error:
        Code.NO_LOCKED_MEMORY.warn(
            f"no page-locked memory is to be had ({error}), so what leaves {like.device} is waited for, at a fraction of "
            "the link's speed; it is the same. Raise the limit on locked memory (ulimit -l), or free memory"
        )
        return torch.empty_like(like, device="cpu")


class Leaving:
    """Tensors on their way to the host as they are now, each by itself: all of a model is not gathered.

    Args:
        tensors: On any device.
        lasts: Whether they are read while training goes on, and so those on the host are copied as well; else these
            are read where they lie.
        stays: Whether one lies on the host.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        lasts: bool = False,
        stays: Callable[[torch.Tensor], bool] = may_look,
    ) -> None:
        self._hosts = [tensor.detach() for tensor in tensors]
        if lasts:
            self._hosts = [one.clone() if stays(one) else one for one in self._hosts]
        leaving: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(self._hosts):
            if not stays(tensor):
                leaving.setdefault(tensor.device, []).append(place)
        self._copies = []
        for places in leaving.values():
            sources = [self._hosts[place] for place in places]
            targets = [_host_memory(source) for source in sources]
            self._copies.append(copy(targets, sources))
            self._copies[-1].hold()
            for place, target in zip(places, targets, strict=True):
                self._hosts[place] = target

    @property
    def travels(self) -> bool:
        """Whether any comes from a device."""
        return bool(self._copies)

    def arrived(self) -> list[torch.Tensor]:
        """Return them on the CPU, once they are here."""
        for one in self._copies:
            one.finish()
        return self._hosts


def leave(tensors: Sequence[torch.Tensor], *, lasts: bool = False) -> Leaving:
    """Begin to copy tensors to the host as they are now; what is queued from now on may overwrite them.

    Args:
        tensors: See `Leaving`.
        lasts: See `Leaving`.
    """
    return Leaving(tensors, lasts=lasts)


class Trail:
    """Tensors of one device that are copied as they are now, beside what the device does next, which must not write to them.

    A thread that waits in `arrived` has them copied in pieces, with a pause as long as each piece took, so that others
    have half of the link. Before anything writes to them, `hold` has the rest copied at once. For any thread.

    Args:
        tensors: Dense, on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = [tensor.detach() for tensor in tensors]
        self._hosts = [_host_memory(source) for source in self._sources]
        self._after = mark(self._sources[0].device)
        #: Of each piece that is not begun: places of tensors, with the first element and the number of elements.
        self._left = deque(_pieces(self._sources))
        #: Copies that are not known to be done.
        self._begun: list[Copy] = []
        self._is_held = False
        self._error: RuntimeError | None = None
        self._turn = threading.Condition()

    def hold(self) -> None:
        """Have the device do what is queued from now on when all is copied: the host goes on, and may have it overwritten.

        A device that fails is said by `arrived`.
        """
        with self._turn:
            self._is_held = True
            self._begin([part for piece in self._left for part in piece])
            self._left.clear()
            try:
                for one in self._begun:
                    one.hold()
            except RuntimeError as error:
                self._error = error
            self._turn.notify_all()

    def arrived(self) -> list[torch.Tensor]:
        """Return them on the CPU, once they are here; what is not begun is copied meanwhile.

        Raises:
            StorageError: If the device fails meanwhile.
        """
        while (one := self._next()) is not None:
            began = time.monotonic()
            one.finish()
            with self._turn:
                self._begun.remove(one)
                self._turn.wait_for(lambda: self._is_held, time.monotonic() - began)
        if self._error is not None:
            raise StorageError(f"a copy off an accelerator failed: {self._error}") from self._error
        return self._hosts

    def freed(self) -> list[int]:
        """Return the places of tensors whose memory their owner has given back."""
        sizes = [source.untyped_storage().nbytes() for source in self._sources]
        return [i for i, source in enumerate(self._sources) if sizes[i] < source.nbytes]

    def _next(self) -> Copy | None:
        with self._turn:
            if not self._begun and self._left:
                self._begin(self._left[0])
                self._left.popleft()
            return self._begun[0] if self._begun else None

    def _begin(self, parts: Sequence[tuple[int, int, int]]) -> None:
        """Begin to copy parts of tensors."""
        if not parts or self._error is not None:
            return
        try:
            targets = [flat(self._hosts[i]).narrow(0, first, n) for i, first, n in parts]
            sources = [flat(self._sources[i]).narrow(0, first, n) for i, first, n in parts]
            self._begun.append(copy(targets, sources, self._after))
        except RuntimeError as error:  # training, which may be here, has no part in it
            self._error = error


#: Half a millisecond of the link of an H200, which others' copies wait at most; of much smaller pieces most of the
#: time would go into starting them. Not measured yet.
_PIECE_BYTES = 32 << 20


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple[int, int, int]]]:
    """Divide tensors into pieces of about as many bytes: place, first element and number of elements of each part."""
    piece: list[tuple[int, int, int]] = []
    free = _PIECE_BYTES
    for place, tensor in enumerate(tensors):
        width, first = tensor.element_size(), 0
        while first < tensor.numel():
            if free < width and piece:
                yield piece
                piece, free = [], _PIECE_BYTES
            count = min(max(free // width, 1), tensor.numel() - first)
            piece.append((place, first, count))
            first, free = first + count, free - count * width
    if piece:
        yield piece


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the CPU; those that lie there are the same ones."""
    return Leaving(tensors).arrived()


class Fetch:
    """Flat tensors on their way to the host; those of one dtype on one device are copied together.

    They are gathered first, so their owner may overwrite or free them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(tensors):
            self._places.setdefault((tensor.dtype, tensor.device), []).append(place)
        joined = [torch.cat([tensors[i] for i in places]) for places in self._places.values()]
        self._hosts = [_host_memory(values) for values in joined]
        self._copies = [
            copy([host], [values]) for host, values in zip(self._hosts, joined, strict=True)
        ]

    @property
    def travels(self) -> bool:
        """Whether they come from a device; else they were here at once."""
        return any(one.travels for one in self._copies)

    def arrived(self) -> list[torch.Tensor]:
        """Return them on the CPU, once they are here."""
        # The last one is waited for, behind which the others are done.
        for one in reversed(self._copies):
            one.finish()
        arrived: list[torch.Tensor] = [torch.empty(0)] * len(self._sizes)
        for places, values in zip(self._places.values(), self._hosts, strict=True):
            parts = values.split([self._sizes[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                arrived[place] = part
        return arrived


def fetch(tensors: Sequence[torch.Tensor]) -> Fetch:
    """Begin to copy flat tensors to the host."""
    return Fetch(tensors)


def fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flat tensors on the CPU; those of one dtype are copied together."""
    return fetch(tensors).arrived()


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of flat tensors where they are; those of one dtype are copied together."""
    found = list(tensors)
    of_dtype: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        of_dtype.setdefault(tensor.dtype, []).append(place)
    for places in of_dtype.values():
        joined = torch.cat([tensors[place] for place in places])
        parts = joined.split([tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part
    return found
