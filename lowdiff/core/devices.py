"""Where tensors live, and what the host does for those that live on an accelerator.

Whoever wants to know asks here and nowhere else, through the module: ``devices.may_look(tensor)``. So a count of
what a step costs on an accelerator can put itself in this place on a machine without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

#: Reads the state of a device's random generator, and sets it.
Generator = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]


def may_look(at: torch.Tensor | torch.device) -> bool:
    """Whether the host may read values there: on an accelerator it would wait for all that is queued."""
    device = at.device if isinstance(at, torch.Tensor) else at
    return device.type == "cpu"


def sums_there(device: torch.device) -> bool:
    """Whether checksums of what lies on a device are taken there, see `lowdiff.core.sums`, and read late.

    On a CPU a CRC-32C is faster, and says at once what was written.
    """
    return not may_look(device)


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


def future_on(device: torch.device) -> torch.futures.Future[Any]:
    """Return a future of something on a device.

    It must know an accelerator: only then does a waiting caller also wait for work that is still queued there.
    """
    return torch.futures.Future(devices=None if may_look(device) else [device])


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


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the CPU; those that lie there are the same ones.

    A CUDA device copies all of them at once, into page-locked memory that PyTorch keeps for the next call: on an H200,
    ``Tensor.cpu`` into fresh pages reached a fiftieth of the link's speed, and waits for each tensor.
    """
    found = []
    streams = set()
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.device.type == "cuda":
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            found.append(host.copy_(tensor, non_blocking=True))
            streams.add(stream_of(tensor.device))
        else:
            found.append(tensor.cpu())
    for stream in streams:
        stream.synchronize()
    return found


class Copy:
    """A tensor on its way into memory of the host that is there already.

    On CUDA a stream of its own copies it, behind what was queued before; nothing that is queued later on another stream
    waits for it. Its owner may free it, and must not overwrite it before it is done.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if source.device.type != "cuda":
            target.copy_(source)
            return
        stream = _copying(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        self._event = stream.record_event()

    @property
    def is_done(self) -> bool:
        """Whether it is here."""
        return self._event is None or bool(self._event.query())

    def finish(self) -> None:
        """Wait until it is here."""
        if self._event is not None:
            self._event.synchronize()


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies off a device."""
    return torch.cuda.Stream(device)


def copy(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Begin to copy a tensor into host memory, whose pages should be locked: else the host waits."""
    return Copy(target, source)


class Fetch:
    """Flat tensors on their way to the host; those of one dtype are copied together.

    They are gathered first, so their owner may overwrite or free them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._places: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            self._places.setdefault(tensor.dtype, []).append(place)
        joined = [torch.cat([tensors[i] for i in places]) for places in self._places.values()]
        self._hosts = [
            torch.empty_like(values, device="cpu", pin_memory=not may_look(values))
            for values in joined
        ]
        self._copies = [
            copy(host, values) for host, values in zip(self._hosts, joined, strict=True)
        ]

    @property
    def is_done(self) -> bool:
        """Whether they are here."""
        return all(one.is_done for one in self._copies)

    def arrived(self) -> list[torch.Tensor]:
        """Return them on the CPU, once they are here."""
        for one in reversed(
            self._copies
        ):  # the last one is waited for, behind which the others are done
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
