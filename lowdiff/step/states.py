"""The states of one step: the only place that knows which may follow which.

::

    OPEN ─► CONSUMED ─► STEPPED ─► SEALING ─► SEALED ─► STAGED ─► the next step is OPEN
      │        ▲           │          ▲
      │        └───────────┘          │
      └───────────────────────────────┘  no optimizer stepped

An optimizer *consumes* gradients when its ``step()`` begins, and has *stepped* when that ends. Another
optimizer may follow, or the same one where ``optimizer_steps="any"`` allows it. ``commit()`` *seals* the
step into a `Differential`, which happens once, and *stages* it. From there on the step is a record:
`RankNews` say when it is committed, the writer's page when it is durable.

What else changed the training is a `Change`: such a step is stored as a full snapshot, because replay of
its record would not lead to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

from lowdiff.errors import UsageError
from lowdiff.protocols import Departed
from lowdiff.step.verdict import Verdict
from lowdiff.types import AverageStep, Differential, EarlierStep, OptimizerStep, Payload, Written

#: Hyper-parameters of one optimizer: its groups without their parameters.
Groups: TypeAlias = "tuple[dict[str, Any], ...]"


class State(Enum):
    """How far a step is."""

    OPEN = auto()
    CONSUMED = auto()
    STEPPED = auto()
    SEALING = auto()
    SEALED = auto()
    STAGED = auto()


class Change(Enum):
    """Why replay of a step's record would not lead to the step; the value completes a warning."""

    TOO_MANY_CALLS = (
        "loop bodies make more optimizer steps (step {step}: {calls}) than staging memory is set "
        "aside for; such a step costs a full snapshot"
    )
    OUTSIDE = (
        "optimizer state, an average, or parameters on an accelerator were changed outside "
        "optimizer.step() and update_parameters() around step {step} (optimizer.load_state_dict, an "
        "EMA swap?); such a step costs a full snapshot"
    )
    BROKEN_OFF = (
        "an optimizer's step or a commit was broken off in step {step}; such a step costs a full "
        "snapshot"
    )
    UNWRITTEN_STATE = (
        "a fused optimizer left state in step {step} that its kernel has not written, because "
        "gradients overflowed; such a step costs a full snapshot"
    )
    GRADIENT_MISSED = (
        "a gradient on an accelerator was changed between its exchange and optimizer.step() of step {step}, and what it "
        "became is gone; the first such step costs a full snapshot, and later ones are looked at more closely"
    )
    NO_ROOM = "staging memory has no room for the gradients of step {step}; such a step costs a full snapshot"
    #: `Proofs` has named the state, and warned of it.
    UNPROVEN_STATE = ""


class Late(Protocol):
    """A part of a sealed step on its way from an accelerator to the host."""

    def complete(self, sealed: Sealed) -> Sealed:
        """Return the step with this part of its record; waits for it."""
        ...

    def learn(self) -> None:
        """Have later steps go by what was found, once it is here: before the same step on all ranks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A step that ended.

    Attributes:
        differential: Its record.
        changes: Why the record cannot be replayed; empty where it can.
        groups: Each optimizer's hyper-parameters at the end of the step. A snapshot stores these: a
            scheduler may move them between two commits.
        calls: Optimizer steps that the loop body made.
        stepped: Bit ``i`` says whether optimizer ``i`` stepped.
        consumed: CRC-32C of the hyper-parameters that its optimizers used and left.
        own: Checksum of this rank's share of the parameters; 0 where ranks are not compared.
        other: Checksum of the share of rank ``watched``, as this rank has it.
        watched: The rank whose share this rank compares with its own.
        of_peers: What other ranks store of the step, by rank, made from this rank's memory; see `Reducer`.
        late: Parts that are on their way from an accelerator, in the order in which they departed; empty once the record
            is whole.
    """

    differential: Differential
    changes: frozenset[Change]
    groups: Sequence[Groups]
    calls: int = 1
    stepped: int = 0
    consumed: int = 0
    own: int = 0
    other: int = 0
    watched: int = 0
    of_peers: Mapping[int, Payload] = field(default_factory=dict)
    late: Sequence[Late] = ()

    def arrived(self) -> Sealed:
        """Return it with its record whole; waits for what is on its way."""
        whole = self
        # Behind the last one the others are done: the host waits once.
        for part in reversed(self.late):
            whole = part.complete(whole)
        return replace(whole, late=()) if self.late else self

    def learn(self) -> None:
        """See `Late.learn`."""
        for part in self.late:
            part.learn()

    @property
    def rebases(self) -> bool:
        """Whether only a full snapshot of the step can be recovered."""
        return bool(self.changes)

    @property
    def first_change(self) -> Change | None:
        """The change that the user is told of, in the order of `Change`."""
        return next((change for change in Change if change in self.changes), None)

    @property
    def warning(self) -> str:
        """Text that tells the user of the first change; empty where there is nothing to tell."""
        first = self.first_change
        if first is None:
            return ""
        return str(first.value).format(step=self.differential.step, calls=self.calls)


class Step:
    """One step of one rank, from its first gradient until it is staged.

    Attributes:
        number: The step that it leads to.
        state: How far it is.
        consumed: Optimizer -> what it consumed in the current call.
        late: Optimizer -> a scaler's verdict that the host has not read.
        departed: Number of a call and optimizer -> gradients that leave an accelerator before they may be overwritten.
        absent: Layout indices of parameters without a gradient when their optimizer stepped.
        earlier: Optimizer calls that others followed.
        changes: What else changed the training.
        sealed: The step as it ended; None before.
    """

    def __init__(self, number: int, num_optimizers: int) -> None:
        self.number = number
        self.state = State.OPEN
        self.consumed: dict[int, OptimizerStep] = {}
        self.late: dict[int, Verdict] = {}
        self.departed: dict[tuple[int, int], Departed] = {}
        self.absent: set[int] = set()
        self.earlier: tuple[EarlierStep, ...] = ()
        self.changes: set[Change] = set()
        self.sealed: Sealed | None = None
        self._ended: set[int] = set()
        #: Whether what can be read only once was: that outlives the state, which another optimizer moves on.
        self._was_read = False
        self._num_optimizers = num_optimizers

    @property
    def calls(self) -> int:
        """Optimizer calls so far, with the current one."""
        return len(self.earlier) + 1

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer stepped, or began to."""
        return bool(self.consumed or self.earlier)

    @property
    def stepped(self) -> frozenset[int]:
        """The optimizers that stepped, or began to, in any call."""
        numbers = range(self._num_optimizers)
        earlier = (i for call in self.earlier for i in numbers if call.optimizers[i].stepped)
        return frozenset((*self.consumed, *earlier))

    @property
    def is_complete(self) -> bool:
        """Whether every optimizer has stepped in the current call."""
        return len(self._ended) == self._num_optimizers

    @property
    def is_broken_off(self) -> bool:
        """Whether an optimizer began its step and did not end it."""
        return self.consumed.keys() > self._ended

    def unfinished(self, names: Sequence[str]) -> str:
        """Say which optimizers stepped and which did not; empty where all did, or none.

        Args:
            names: Of the optimizers.
        """
        stepped = self.stepped
        done = [name for i, name in enumerate(names) if i in stepped]
        left = [name for i, name in enumerate(names) if i not in stepped]
        if not done or not left:
            return ""
        return f"{' and '.join(done)} stepped and {' and '.join(left)} did not"

    def refuse_again(self, optimizer: int, names: Sequence[str]) -> None:
        """Refuse a second ``step()`` of an optimizer in a body that may make one.

        Args:
            optimizer: Which one.
            names: Of all optimizers.

        Raises:
            UsageError: If the optimizer has begun its step already.
        """
        if optimizer not in self.consumed:
            return
        name = names[optimizer]
        if optimizer not in self._ended:
            raise UsageError(
                f"optimizer.step() of {name} began again in step {self.number} before it had "
                "ended. If it raised an error, or was interrupted (Ctrl-C in a notebook), attach again: training "
                "goes on from the last committed step. Or it calls the step() of a class of which there are "
                "optimizers as well, so that PyTorch runs the hooks of both: share the update in a method of "
                "another name"
            )
        unfinished = self.unfinished(names)
        if unfinished:
            raise UsageError(
                f"{name} stepped twice between commits of step {self.number}; so far {unfinished}. "
                "If the loop left the body of that step by break: steps() commits such a body only "
                "where all optimizers stepped, so call checkpointer.commit() after the break. If "
                "optimizers step in turn, or one more often than others: call checkpointer.commit() "
                "after each step, or make one checkpointer.steps(...) body of each. Without a "
                'compressor, Checkpointer(..., optimizer_steps="any") takes all steps of a body together'
            )
        raise UsageError(
            f"the optimizer stepped twice between commits of step {self.number}; add one line, "
            "checkpointer.commit(), after optimizer.step(), or loop over "
            "checkpointer.steps(...). If the loop has that line and was interrupted before it had ended "
            "(Ctrl-C in a notebook), attach again: training goes on from the last committed step. Without a "
            'compressor, Checkpointer(..., optimizer_steps="any") takes all steps of a body together'
        )

    def consume(self, optimizer: int, done: OptimizerStep, absent: Sequence[int]) -> None:
        """Enter `CONSUMED`: an optimizer has begun its step."""
        self.consumed[optimizer] = done
        self.absent.update(absent)
        self.state = State.CONSUMED

    def end(self, optimizer: int) -> None:
        """Enter `STEPPED`: the optimizer's step has ended."""
        self._ended.add(optimizer)
        self.state = State.STEPPED

    def end_call(self, averages: Mapping[str, AverageStep], written: Written) -> None:
        """Close the current call, which another one of the same body follows."""
        if self.is_broken_off:
            self.changes.add(Change.BROKEN_OFF)
        skipped = OptimizerStep(stepped=False, consumed=())
        call = EarlierStep(
            optimizers=tuple(self.consumed.get(i, skipped) for i in range(self._num_optimizers)),
            absent=tuple(sorted(self.absent)),
            payload=Payload(()),
            averages={name: done for name, done in averages.items() if done.updated},
            written=written,
        )
        self.earlier = (*self.earlier, call)
        self.consumed.clear()
        self.absent.clear()
        self._ended.clear()

    def begin_sealing(self, *, ranks: int) -> None:
        """Enter `SEALING`, from which only `SEALED` follows: what is read of a step is read once.

        Raises:
            UsageError: If an earlier attempt was broken off, and there are several ranks. The others
                staged the step and will not take a replacement snapshot.
        """
        if self._was_read:
            self.changes.add(Change.BROKEN_OFF)
            if ranks > 1:
                raise UsageError(
                    f"commit() of step {self.number} was broken off on this rank, and what it had read "
                    "is gone: call close() and end all ranks; the next attach goes on from the step "
                    "before"
                )
        self._was_read, self.state = True, State.SEALING

    def seal(self, sealed: Sealed) -> None:
        """Enter `SEALED`."""
        assert self.state is State.SEALING
        self.sealed, self.state = sealed, State.SEALED

    def stage(self) -> None:
        """Enter `STAGED`: its record is in the staging log."""
        assert self.state is State.SEALED
        self.state = State.STAGED
