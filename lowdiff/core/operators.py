"""Launches of Triton's kernels as operators of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowdiff.core import devices

_library = torch.library.Library("lowdiff", "FRAGMENT")


def operator(schema: str, launch: Callable[..., None]) -> Callable[..., None]:
    """Define an operator that returns nothing; what it changes through addresses its schema does not say.

    It has a fake, so that what a step launches can be counted without a device.
    """
    name = _library.define(f"{schema} -> ()")

    def launch_there(*given: Any) -> None:
        with devices.chosen(given[0].device):  # Triton launches on the current one
            launch(*given)

    for key in ("CUDA", "CPU"):  # on CPUs Triton interprets
        _library.impl(name, launch_there, key)
    torch.library.register_fake(f"lowdiff::{name}", lambda *_: None, lib=_library)
    made: Callable[..., None] = getattr(torch.ops.lowdiff, name).default
    return made
