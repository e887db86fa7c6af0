"""Items: everything of a step that is no parameter, gradient or hyper-parameter.

Buffers and frozen parameters, the random generators, and the user's stateful objects. An item is
logged only in steps that changed its bytes; recovery takes its newest value at or before a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from crc32c import crc32c

from lowdiff.errors import ConfigError
from lowdiff.layout import byte_view
from lowdiff.persistence.values import decode, encode, same
from lowdiff.recovery.state import FROZEN_ITEM, RNG_ITEM, STATEFUL_ITEM


@runtime_checkable
class Stateful(Protocol):
    """PyTorch's own protocol for objects that checkpoint themselves."""

    def state_dict(self) -> dict[str, Any]:
        """State as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""
        ...


def random_states(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Item name -> reader of each global random generator."""
    readers: dict[str, Callable[[], Any]] = {
        "python": random.getstate,
        "numpy": lambda: np.random.get_state(legacy=True),
        "torch": torch.get_rng_state,
    }
    if device.type == "cuda":
        readers["cuda"] = lambda: torch.cuda.get_rng_state(device)
    return {RNG_ITEM + name: reader for name, reader in readers.items()}


def restore_random_states(items: Mapping[str, bytes], device: torch.device) -> None:
    """Set every global random generator that the items hold."""
    writers: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
        "cuda": lambda state: torch.cuda.set_rng_state(state, device),
    }
    for name, writer in writers.items():
        if RNG_ITEM + name in items and (name != "cuda" or device.type == "cuda"):
            writer(decode(items[RNG_ITEM + name]))


class ItemTracker:
    """Finds which items changed since they were last asked for."""

    def __init__(
        self,
        constants: Callable[[], Mapping[str, torch.Tensor]],
        stateful: Mapping[str, Stateful],
        device: torch.device,
    ) -> None:
        self._constants = constants
        self._readers = random_states(device)
        for name, thing in stateful.items():
            if not isinstance(thing, Stateful):
                raise ConfigError(
                    f"{name}={type(thing).__name__} has no state_dict and load_state_dict; wrap "
                    "it in an object that has both, or leave it out"
                )
            self._readers[STATEFUL_ITEM + name] = thing.state_dict
            check_round_trip(name, thing.state_dict())
        self._versions: dict[str, tuple[int, int]] = {}
        self._checksums: dict[str, int] = {}
        self._committed: dict[str, bytes] = {}
        self._read: dict[str, tuple[Any, bytes]] = {}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Buffers and frozen parameters by item name."""
        return self._constants()

    @property
    def committed(self) -> Mapping[str, bytes]:
        """Every item but the tensors, as of the last ``start`` or ``changed``."""
        return self._committed

    def read(self) -> dict[str, bytes]:
        """Every item but the tensors, as it is now."""
        found = {}
        for name, read in self._readers.items():
            raw = read()
            # Python's and NumPy's generators seldom move, and comparing is cheaper than encoding.
            seen, data = self._read.get(name, (None, b""))
            if not name.startswith(RNG_ITEM) or not _equal(seen, raw):
                data = encode(raw, name=name)
                self._read[name] = (raw, data)
            found[name] = data
        return found

    def is_as_committed(self) -> bool:
        """Whether buffers and frozen parameters are those of the last call.

        Generators and stateful objects are left out: of these a snapshot holds what was committed,
        and a data loader moves on when its epoch ends, after the last commit.
        """
        return not self.changed_tensors()

    def start(self, items: Mapping[str, bytes]) -> None:
        """Begin with what recovery knows, whatever the generators hold at the moment."""
        self._committed = {name: items[name] for name in self._readers if name in items}
        self.changed_tensors()

    def changed(self) -> dict[str, bytes]:
        """Items whose bytes differ from those of the last call, which they replace."""
        found = {
            name: data for name, data in self.read().items() if self._committed.get(name) != data
        }
        self._committed.update(found)
        return found | {
            name: encode(tensor, name=name) for name, tensor in self.changed_tensors().items()
        }

    def changed_tensors(self) -> dict[str, torch.Tensor]:
        """Buffers and frozen parameters that differ from those of the last call, on the CPU."""
        found = {}
        for name, tensor in self._constants().items():
            # Version counters are right for frozen parameters, which only in-place operations
            # write, but not for buffers: batch norm updates its statistics behind their back.
            version = (tensor._version, tensor.data_ptr())
            if name.startswith(FROZEN_ITEM) and self._versions.get(name) == version:
                continue
            self._versions[name] = version
            host = tensor.detach().cpu().contiguous()
            checksum = crc32c(byte_view(host)) if host.numel() else 0
            if self._checksums.get(name) != checksum:
                self._checksums[name] = checksum
                found[name] = host
        return found


def _equal(left: Any, right: Any) -> bool:
    """Whether two states of one generator are the same; they hold tuples, arrays and tensors."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        if any(isinstance(part, np.ndarray) for part in left):
            return len(left) == len(right) and all(map(_equal, left, right))
        return left == right
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return np.array_equal(left, right)
    return bool(left == right)


def check_round_trip(name: str, value: Any) -> None:
    """Prove that a value survives encoding (design rule R9).

    Raises:
        ConfigError: Naming the part that does not.
    """
    if not same(decode(encode(value, name=name)), value):
        raise ConfigError(
            f"{name} does not survive encoding; return plain values and tensors from state_dict()"
        )
