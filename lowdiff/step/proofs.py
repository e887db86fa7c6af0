"""Registered optimizers prove themselves: some steps of each are replayed while the training runs.

Torch's own optimizers are proven by lowdiff's tests, and pay nothing here. Of a registered one lowdiff
knows only what its author says, so this rank's share of a step is replayed and compared, before it is committed:

- the first two steps that change a parameter, and the tenth: a number that an object or its class counts
  by itself is another one in replay, at once or at the second step;
- every step in which a new key of state appears. Up to the tenth step its pre-image is there. A key that
  comes later is that of a step which nobody copied: that step is stored as a full snapshot instead of
  being replayed, and the next one is proven.

So a copy of parameters, gradients and optimizer state of the share is made at each of the first ten
steps, and none later. Meanwhile ranks compare their verdicts at each commit, so that all of them refuse
a step together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lowdiff.core.events import Code
from lowdiff.core.layout import flat_like, shares_of
from lowdiff.errors import RankLost, UnsupportedOptimizer
from lowdiff.model.binding import Attached
from lowdiff.model.items import random_generators
from lowdiff.model.ranks import Ranks
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.replay.optimizers import granularity, is_registered
from lowdiff.recovery.replay.proof import Held, refuse_unproven
from lowdiff.step.ddp_hook import without_autocast
from lowdiff.types import Fence, OptimizerStep

#: Steps that changed a parameter, counted from 1, which are proven; no copies are made after the last.
_PROVEN = (1, 2, 10)


@dataclass(slots=True, eq=False)
class _Course:
    """How far one optimizer's proof has come.

    Attributes:
        parameters: Layout index -> parameter: what this rank proves.
        keys: Keys of its state that have been seen.
        num_changed: Steps that changed a parameter.
        is_owed: Whether the next step is proven whatever it does.
        step: The step that is under way, None if it is not copied.
        done: What the optimizer consumes in it.
        gradients: Copies of what it consumes.
        before: A copy of what was there before it.
    """

    parameters: Mapping[int, torch.nn.Parameter]
    keys: set[str]
    num_changed: int = 0
    is_owed: bool = False
    step: int | None = None
    done: OptimizerStep | None = None
    gradients: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    before: Held | None = None


class Proofs:
    """Proves the registered ones among the attached optimizers; see the module.

    Attributes:
        refusal: Why a step does not count; None while all is well.
        has_late_state: Whether the step under way has made state that replay was not proven to make.
    """

    def __init__(
        self, attached: Attached, fence: Fence, ranks: Ranks, *, is_replayed: bool
    ) -> None:
        """Begin with what is attached now, restored if the run has history.

        Args:
            attached: Model and optimizers.
            fence: Of this incarnation and rank.
            ranks: Compare their verdicts.
            is_replayed: Whether recovery replays steps; else there is nothing to prove.
        """
        self.refusal: UnsupportedOptimizer | None = None
        self.has_late_state = False
        self._attached = attached
        self._fence = fence
        share = set(shares_of(fence.layout, fence.world_size)[fence.rank])
        self._courses: dict[int, _Course] = {}
        for index, spec in enumerate(attached.specs):
            if not (is_replayed and is_registered(spec)):
                continue
            is_whole = granularity(spec) == "whole"
            own = {
                i: parameter
                for i, parameter in attached.parameters.items()
                if attached.owner[i] == index and (is_whole or i in share)
            }
            self._courses[index] = _Course(own, self._keys(index))
        self._ranks = ranks
        #: Whether steps are copied, and ranks ask each other at the commit: on all of them or on none.
        self._is_open = bool(self._courses)
        self._settled_step = -1

    def begin(self) -> None:
        """Start the next step."""
        self.has_late_state = False

    def copies(self, index: int) -> bool:
        """Whether `before_step` copies what an optimizer's next step takes."""
        course = self._courses.get(index)
        return course is not None and self._is_open and bool(course.parameters)

    def before_step(self, index: int, step: int, done: OptimizerStep) -> None:
        """Copy what a proof of the step would take; the gradients have been read for the log.

        Args:
            index: The optimizer that is about to step.
            step: Number of the step.
            done: What it consumes beside gradients.
        """
        course = self._courses.get(index)
        if course is None:
            return
        course.step = None
        if not self.copies(index):
            return
        gradients = self._attached.gradients(index)
        # An expanded gradient has no memory of its own for each element; its copy has.
        course.gradients = {
            i: None if (gradient := gradients[i]) is None else gradient.clone()
            for i in course.parameters
        }
        state = self._attached.optimizers[index].state
        course.before = Held.copied(self._fence.layout, course.parameters, state)
        course.step, course.done = step, done

    def after_step(self, index: int, step: int) -> None:
        """Replay the step that an optimizer has just made, if it is one to be proven.

        A step that does not come out is told by `refusal`.
        """
        course = self._courses.get(index)
        if course is None:
            return
        with without_autocast(self._attached.device):
            self._compare(index, course, step)

    def _compare(self, index: int, course: _Course, step: int) -> None:
        new = self._keys(index) - course.keys
        course.keys |= new
        if not self._is_open:
            if new:
                self._put_off(index, course, step, new)
            return
        if course.step is None:  # of this optimizer the rank has no share
            return
        assert course.before is not None
        live = self._live(index, course)
        before = course.before.parameters
        has_changed = not all(has_same_bits(v, before[i]) for i, v in live.parameters.items())
        course.num_changed += has_changed
        if new or course.is_owed or (has_changed and course.num_changed in _PROVEN):
            self._prove(index, course, live)
            course.is_owed = False
        course.step = course.done = course.before = None
        course.gradients = {}

    def reopen(self) -> None:
        """A rank stored its last step as a snapshot, perhaps because of late state: ask again."""
        self._is_open = bool(self._courses)

    def settle(self, step: int) -> None:
        """Let no rank commit a step that one of them cannot replay.

        Args:
            step: The step to be committed.

        Raises:
            UnsupportedOptimizer: On all ranks, naming the optimizer and what differs.
            RankLost: If a rank ended.
        """
        if self._is_open and step != self._settled_step:
            own = "" if self.refusal is None else str(self.refusal)
            is_proving = any(
                course.parameters and (course.is_owed or course.num_changed < _PROVEN[-1])
                for course in self._courses.values()
            )
            try:
                told = self._ranks.gather([own, is_proving])
            except RuntimeError as error:
                raise RankLost(error) from error
            self._settled_step = step
            self._is_open = any(others for _, others in told)
            for rank, (text, _) in enumerate(told):
                if text and self.refusal is None:
                    self.refusal = UnsupportedOptimizer(f"rank {rank}: {text}")
        if self.refusal is not None:
            raise self.refusal

    def _put_off(self, index: int, course: _Course, step: int, new: set[str]) -> None:
        """State came after the copies had ended: snapshot this step, and prove the next."""
        course.is_owed = self.has_late_state = True
        Code.LATE_OPTIMIZER_STATE.warn(
            f"{self._attached.specs[index].class_name.rpartition('.')[2]} began to keep "
            f"{', '.join(f'state[{key!r}]' for key in sorted(new))} in step {step}, later than "
            "lowdiff copies what a step starts from; that step costs a full snapshot, and the "
            "next one is replayed and compared",
            rank=self._fence.rank,
        )

    def _live(self, index: int, course: _Course) -> Held:
        specs = self._fence.layout.parameters
        state = self._attached.optimizers[index].state
        return Held(
            {i: flat_like(p.detach(), specs[i]) for i, p in course.parameters.items()},
            {i: state.get(p, {}) for i, p in course.parameters.items()},
        )

    def _prove(self, index: int, course: _Course, live: Held) -> None:
        assert course.before is not None
        assert course.done is not None
        assert course.step is not None
        try:
            with _generators_put_back(self._attached.device):
                refuse_unproven(
                    self._fence,
                    index,
                    course.step,
                    course.done,
                    course.gradients,
                    course.before,
                    live,
                )
        except UnsupportedOptimizer as error:
            self.refusal = self.refusal or error

    def _keys(self, index: int) -> set[str]:
        """Keys under which an optimizer keeps state of any parameter."""
        state = self._attached.optimizers[index].state
        return {str(key) for p in self._attached.parameters.values() for key in state.get(p, ())}


@contextmanager
def _generators_put_back(device: torch.device) -> Iterator[None]:
    """Put the generators back afterwards, so that draws inside do not move the training's on."""
    states = [(write, read()) for read, write in random_generators(device).values()]
    try:
        yield
    finally:
        for write, state in states:
            write(state)
