"""Items of a rank that died before it had staged them: as another rank has them, where that is right.

Where the memory of the rank is lost with its node, what is known of it is what all ranks had alike: they
compare checksums of their items in every step, by kind.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from crc32c import crc32c

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import encode
from lowdiff.persistence.staging.items import read_ahead, read_items
from lowdiff.persistence.staging.status import SavedStatus
from lowdiff.recovery.state import BUFFER_ITEM, LOOP_STATE, RNG_ITEM, STATEFUL_ITEM, TENSOR_ITEM

#: What a script writes itself, perhaps on one rank alone; its large tensors are items of their own.
_OF_SCRIPT = STATEFUL_ITEM + LOOP_STATE, f"{TENSOR_ITEM}{LOOP_STATE}/"
#: Kinds of items that ranks compare, by the beginning of their names; the last is all others.
_KINDS = (RNG_ITEM, BUFFER_ITEM, "")


class ItemSums:
    """Checksums of a rank's items, by kind; only what changed is read."""

    def __init__(self) -> None:
        self._sums: list[dict[str, int]] = [{} for _ in _KINDS]
        self._all = [0] * len(_KINDS)

    @property
    def by_kind(self) -> tuple[int, int, int]:
        """One checksum a kind: of generators, of buffers, and of the rest."""
        generators, buffers, objects = self._all
        return generators, buffers, objects

    def update(self, items: Mapping[str, bytes]) -> None:
        """Take over items that changed."""
        changed = set()
        for name, data in items.items():
            kind = _kind(name)
            self._sums[kind][name] = crc32c(data, crc32c(name.encode()))
            changed.add(kind)
        for kind in changed:
            sums = self._sums[kind]
            # Joined in order: added up, differences of two items could cancel.
            joined = b"".join(sums[name].to_bytes(4, "little") for name in sorted(sums))
            self._all[kind] = crc32c(joined)


def alike_bits(by_rank: Sequence[Sequence[int]]) -> int:
    """Bits of the kinds of which all ranks have one checksum."""
    columns = zip(*by_rank, strict=True)
    return sum(1 << kind for kind, column in enumerate(columns) if len(set(column)) == 1)


def _kind(name: str) -> int:
    return next(kind for kind, start in enumerate(_KINDS) if name.startswith(start))


def items_of_lost(
    step: int, rank: int, own: StagingFolder, saved: SavedStatus, *, takes_buffers: bool
) -> tuple[dict[str, bytes] | None, str]:
    """Return all items at a step of a rank whose staging memory is lost: what all ranks had alike.

    Args:
        step: The step.
        rank: The lost rank.
        own: Staging folder of a survivor.
        saved: Tells which kinds of items all ranks had alike, and after which step: this one, or the one
            before, because the rank was lost before it told of this one.
        takes_buffers: Whether the lost rank's buffers are overwritten by rank 0's before their next use.

    Returns:
        The items, and what the user should know of them; None, and why, where something is lost.
    """
    if saved.alike_step not in (step - 1, step):
        return None, "it had not told the others yet what it had"
    now, then = read_items(own, step), read_items(own, saved.alike_step)
    if now is None or then is None:
        return None, "no survivor has the items of its last two steps any more"

    def is_alike(name: str) -> bool:
        return bool(saved.alike >> _kind(name) & 1)

    if saved.alike_step < step:
        theirs = {name: data for name, data in then.items() if is_alike(name)}
        seed = own.run_id, rank, step
        return inherited(
            Known(now, None, then), None, theirs, seed=seed, takes_buffers=takes_buffers
        )
    found: dict[str, bytes] = {}
    reseeded = []
    for name, data in now.items():
        if is_alike(name) or (takes_buffers and name.startswith(BUFFER_ITEM)):
            found[name] = data
        elif name.startswith(RNG_ITEM):
            found[name] = encode(_seeded_anew(name, (own.run_id, rank, step)), name=name)
            reseeded.append(name)
        else:
            return None, f"it alone had {name}"
    return found, _told(reseeded)


def items_of_dead(
    step: int, rank: int, own: StagingFolder, dead: StagingFolder, *, takes_buffers: bool
) -> tuple[dict[str, bytes] | None, str]:
    """Return all items of a dead rank at a step, from its staging memory and a survivor's.

    Args:
        step: The step.
        rank: The dead rank.
        own: Staging folder of the survivor.
        dead: That of the dead rank.
        takes_buffers: See `inherited`.

    Returns:
        The items, and what the user should know of them; None, and why, where something is lost.
    """
    items = read_items(dead, step)
    if items is not None:
        return items, ""
    now, before = read_items(own, step), read_items(own, step - 1)
    theirs = read_items(dead, step - 1)
    if now is None or before is None or theirs is None:
        return None, "the items of the last two steps are not there any more"
    call, own_ahead = read_ahead(own, step)
    their_call, ahead = read_ahead(dead, step)
    # What follows an earlier call of the step is not known.
    is_known = call >= 0 and their_call == call
    return inherited(
        Known(now, own_ahead if is_known else None, before),
        ahead if is_known else None,
        theirs,
        seed=(own.run_id, rank, step),
        takes_buffers=takes_buffers,
    )


@dataclass(frozen=True, slots=True)
class Known:
    """Items of a survivor.

    Attributes:
        now: At the step.
        ahead: Those that had moved before the last of its optimizers made the step; None if not known.
        before: At the step before.
    """

    now: Mapping[str, bytes]
    ahead: Mapping[str, bytes] | None
    before: Mapping[str, bytes]


def inherited(
    own: Known,
    ahead: Mapping[str, bytes] | None,
    before: Mapping[str, bytes],
    *,
    seed: tuple[str, int, int],
    takes_buffers: bool,
) -> tuple[dict[str, bytes] | None, str]:
    """Rebuild the items of a dead rank at a step, from its own up to its optimizers and a survivor's.

    All ranks run one program: what the survivor's optimizers found as it was at the step's end, so did
    the dead rank's. What moved behind them is taken from the survivor where both had it alike until then, but
    for buffers, which a rank's own batch moves, and for what the script itself keeps, unless it did not move.
    Where it is not known how far a generator was, it is seeded anew.

    Args:
        own: The survivor's.
        ahead: Those of the dead rank's that had moved before it made the step; None if it had not come so far.
        before: The dead rank's at the step before.
        seed: Run, rank and step: from these generators are seeded anew.
        takes_buffers: Whether the dead rank's buffers are overwritten by rank 0's before their next use.

    Returns:
        The items, and what the user should know of them; None, and why, where something is lost.
    """
    found: dict[str, bytes] = {}
    reseeded, supposed = [], []
    for name in sorted({*own.now, *before, *(ahead or ())}):
        now, prior, theirs = own.now.get(name), own.before.get(name), before.get(name)
        is_generator, is_buffer = name.startswith(RNG_ITEM), name.startswith(BUFFER_ITEM)
        is_alike = theirs == prior
        if ahead is not None and own.ahead is not None:
            own_ahead, theirs = own.ahead.get(name, prior), ahead.get(name, theirs)
            is_settled, is_alike = own_ahead == now, is_alike and own_ahead == theirs
        else:  # it may have moved as far as the survivor's did
            is_settled = is_generator and prior == now
            is_supposed = is_alike and prior == now and name.startswith(_OF_SCRIPT)
            is_alike = is_alike and (is_supposed or not name.startswith(_OF_SCRIPT))
            supposed += [name] if is_supposed else []
        if is_settled and theirs is not None:
            found[name] = theirs
        # A rank's own batch moves its buffers away from the others', as batch norm's.
        elif is_alike and (prior == now or not is_buffer):
            found |= {} if now is None else {name: now}
        elif is_generator:
            found[name] = encode(_seeded_anew(name, seed), name=name)
            reseeded.append(name)
        elif is_buffer and takes_buffers and now is not None:
            found[name] = now
        else:
            return None, f"it alone had {name}"
    return found, _told(reseeded, supposed)


def _told(reseeded: Sequence[str], supposed: Sequence[str] = ()) -> str:
    """Tell the user of generators that are seeded anew, and of what is supposed not to have moved."""
    texts = []
    if reseeded:
        names = " and ".join(name.removeprefix(RNG_ITEM) for name in reseeded)
        texts.append(f"its random generators ({names}) are seeded anew from run, rank and step")
    if supposed:
        texts.append("what it alone wrote into checkpointer.state in this step, if it did, is lost")
    return "; ".join(texts)


def _seeded_anew(name: str, seed: tuple[str, int, int]) -> Any:
    """State of a generator that is seeded by what identifies its rank and step."""
    number = zlib.crc32(repr((name, *seed)).encode())
    kind = name.removeprefix(RNG_ITEM)
    if kind == "python":
        return random.Random(number).getstate()
    if kind == "numpy":
        return np.random.RandomState(number).get_state(legacy=False)
    if kind == "cuda":  # its seed, and how far it has come
        return torch.tensor([number, 0], dtype=torch.int64).view(torch.uint8)
    return torch.Generator().manual_seed(number).get_state()
