"""Pack arrays of several parameters into one section of a payload, and unpack them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lowdiff.compressors.changes import Factors
from lowdiff.compressors.lane import share
from lowdiff.core import devices
from lowdiff.core.memory import bits
from lowdiff.errors import ReplayMismatch
from lowdiff.types import Bits, Layout, Payload, Section


def numbers(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return ascending layout indices as an array."""
    return np.array(values, dtype=np.int64)


def floats(patterns: npt.NDArray[np.integer[Any]], dtype: torch.dtype) -> torch.Tensor:
    """Return bit patterns as a tensor; copy them if their memory is read-only.

    Raises:
        ReplayMismatch: If the width of the patterns is not that of ``dtype``.
    """
    if patterns.itemsize != dtype.itemsize:
        raise ReplayMismatch(
            f"a payload holds {patterns.itemsize} bytes of each number that is {dtype} in this run"
        )
    writable = np.require(patterns, requirements="W")
    return torch.from_numpy(writable.view(f"i{writable.itemsize}")).view(dtype)


def pieces(name: str, layout: Layout, tensors: Mapping[int, torch.Tensor]) -> list[Section]:
    """Return flat tensors of some parameters as one section per dtype of the *tensors*.

    Sections: ``NAME/parameters``, ascending layout indices, and ``NAME/DTYPE`` for each dtype among
    the tensors; tensors are in layout order.
    """
    chosen = sorted(tensors)
    if not chosen:
        return []
    made = [Section(f"{name}/parameters", "ascending", numbers(chosen))]
    for dtype in layout.dtypes:
        own = [tensors[i] for i, _ in layout.of_dtype(dtype) if i in tensors]
        if own:
            (values,) = devices.on_host([torch.cat(own)])
            made.append(Section(f"{name}/{dtype}", "planes", bits(values)))
    return made


def listed(name: str, payload: Payload, layout: Layout) -> list[int]:
    """Return the layout indices of the parameters that sections ``NAME/...`` hold.

    Raises:
        ReplayMismatch: If the layout has no such parameter.
    """
    section = payload.section(f"{name}/parameters")
    found = [] if section is None else [int(i) for i in section.data]
    if found and not 0 <= min(found) <= max(found) < len(layout.parameters):
        raise ReplayMismatch(f"a payload names parameter {max(found)} of {len(layout.parameters)}")
    return found


def shared_parts(
    name: str,
    payloads: Sequence[Payload],
    layout: Layout,
    size_of: Callable[[int], int] | None = None,
) -> list[dict[int, Bits]]:
    """Undo `pieces` of every rank: layout index -> bit patterns of its share.

    Args:
        name: Name of the sections.
        payloads: Payloads of all ranks, in rank order.
        layout: The layout that the payloads were made for.
        size_of: Number of values of a parameter, of which each rank stores its share; None for the
            parameter's number of elements.

    Raises:
        ReplayMismatch: If the sections do not fit together.
    """
    specs, everyone = layout.parameters, []
    for rank, payload in enumerate(payloads):
        found: dict[int, Bits] = {}
        taken: dict[str, int] = {}
        for i in listed(name, payload, layout):
            dtype, size = specs[i].dtype, specs[i].numel if size_of is None else size_of(i)
            section = payload.section(f"{name}/{dtype}")
            first, last = share(size, rank, len(payloads))
            start = taken.get(dtype, 0)
            stop = taken[dtype] = start + last - first
            if section is None or stop > section.data.size:
                raise ReplayMismatch(
                    f"a payload's section {name}/{dtype} ends before parameter {specs[i].name!r}"
                )
            found[i] = section.data[start:stop]
        everyone.append(found)
    return everyone


def missed_section(parameters: Sequence[int]) -> list[Section]:
    """Return the section that says which gradients a payload lacks, by layout index; [] for none."""
    own = numbers(sorted(parameters))
    return [Section("missed/parameters", "ascending", own)] if parameters else []


def refuse_missed(payloads: Sequence[Payload], layout: Layout) -> None:
    """Refuse payloads that lack what an optimizer consumed.

    Records of such a step say that it cannot be replayed. Of a sharded model only some ranks may say so.

    Raises:
        ReplayMismatch: If there is one.
    """
    for rank, payload in enumerate(payloads):
        for i in listed("missed", payload, layout):
            raise ReplayMismatch(
                f"rank {rank} did not store the gradient of {layout.parameters[i].name!r}, which was changed on an "
                "accelerator between its exchange and the optimizer"
            )


def factor_sections(factors: Mapping[int, Factors]) -> list[Section]:
    """Return the factors that parameters were multiplied by after their exchange; [] for none.

    Sections: ``changed/parameters``, and ``changed/factors`` with equally many float64 per
    parameter: shorter lists are filled up with 1.0.
    """
    changed = {i: factors[i] for i in sorted(factors) if factors[i]}
    if not changed:
        return []
    table = np.ones((len(changed), max(map(len, changed.values()))), dtype=np.float64)
    for row, own in zip(table, changed.values(), strict=True):
        row[: len(own)] = own
    return [
        Section("changed/parameters", "ascending", numbers(list(changed))),
        Section("changed/factors", "planes", table.view(np.uint64).ravel()),
    ]


def factors_of(payload: Payload) -> dict[int, Factors]:
    """Undo `factor_sections`."""
    changed, table = payload.section("changed/parameters"), payload.section("changed/factors")
    if changed is None or table is None or changed.data.size == 0:
        return {}
    if table.data.size % changed.data.size:
        raise ReplayMismatch(f"{table.data.size} factors for {changed.data.size} parameters")
    rows = np.ascontiguousarray(table.data).view(np.float64).reshape(changed.data.size, -1)
    return {
        int(i): tuple(float(factor) for factor in row if factor != 1.0)
        for i, row in zip(changed.data, rows, strict=True)
    }
