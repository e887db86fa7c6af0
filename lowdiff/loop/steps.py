"""The user's loop: find where its first body begins, and end its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lowdiff.commit.session import Session
from lowdiff.core.events import Code
from lowdiff.core.transforms import inside
from lowdiff.errors import UsageError
from lowdiff.loop.fetches import Body
from lowdiff.model.binding import Attached
from lowdiff.model.items import is_unmoved, random_generators, restore_random_states
from lowdiff.recovery.state import RNG_ITEM


class LoopState(dict[str, Any]):
    """A dict that is logged in every step that changes it, and restored by ``attach``.

    Values are tensors, numbers, strings, None, and lists, tuples and dicts of them. Each rank has its
    own. Tensors come back on the CPU.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        return dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content."""
        self.clear()
        self.update(state_dict)


#: Most numbers that a DataLoader's iterator draws: one for its workers, one for a shuffled order.
#: These draws are harmless in a resumed run, because the generators are restored after them.
_MOST_SEEDS = 2


class Draws:
    """Watches the global generators from its construction on."""

    def __init__(self, device: torch.device) -> None:
        self._readers = {
            name.removeprefix(RNG_ITEM): read
            for name, (read, _) in random_generators(device).items()
        }
        self._before: Mapping[str, Any] = {name: read() for name, read in self._readers.items()}

    def names(self, *, may_seed: bool) -> list[str]:
        """Return the generators that were drawn from.

        Args:
            may_seed: Whether to ignore seeds of data loaders' iterators.
        """
        return [
            name
            for name, read in self._readers.items()
            if not _same(self._before[name], read(), may_seed=may_seed and name == "torch")
        ]


def _same(before: Any, now: Any, *, may_seed: bool) -> bool:
    if not isinstance(before, torch.Tensor):
        return is_unmoved(before, now)
    generator = torch.Generator()
    for _ in range(_MOST_SEEDS if may_seed else 0):
        if torch.equal(before, now):
            return True
        generator.set_state(before)
        torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
        before = generator.get_state()
    return torch.equal(before, now)


#: Where the generators were restored; each is a surer sign of the first body than the one before. A
#: model may be tried out, also in training mode, between attach and the loop.
_NOWHERE, _IN_EVALUATION, _IN_TRAINING, _IN_BODY = range(4)

_CLOSED = (
    "the Checkpointer was closed inside its own loop; leave the loop with break and close the "
    "Checkpointer afterwards"
)


class TrainingLoop:
    """Restores the random generators when the first body begins, and ends steps.

    A loop ends its steps by ``steps()`` or by ``commit()``. Large because whoever restores has to know
    which body is open, which those know that begin and end it.
    """

    def __init__(
        self, attached: Attached, session: Session, random_states: Mapping[str, bytes]
    ) -> None:
        """Watch a model and its optimizers.

        Args:
            attached: Model and optimizers.
            session: Session that commits steps.
            random_states: Generators to restore when the first body begins: building a
                DataLoader's iterator draws from them before. A run at step 0 has drawn nothing, so
                its generators stay as the script seeded them, also after attach.
        """
        self._model, self._device = attached.model, attached.device
        self._session = session
        self._random_states = random_states
        self._restored = _NOWHERE if session.step else _IN_BODY
        self._draws = Draws(attached.device) if session.step else None
        self._why_over = ""
        self._detached: DetachedLoop | None = None
        self._is_in_body = self._has_ended = False
        self._ends_bodies = False  # whether steps() ends the bodies
        self._thread = 0  # that committed last
        # Only a resumed run has generators to restore, and only until its first body is over.
        self._hooks: list[RemovableHandle] = []
        if session.step:
            hook = _Hook(self._before_forward)
            self._hooks += [part.register_forward_pre_hook(hook) for part in _hooked(self._model)]
            self._hooks += [
                optimizer.register_step_post_hook(lambda *_: self._leave_generators())
                for optimizer in attached.optimizers
            ]

    def steps(self, until: int) -> Iterator[int]:
        """See ``Checkpointer.steps``."""
        session = self._session
        if session.has_finished_step:  # in a body that the loop left
            self._commit()
        self._ends_bodies = True
        while session.step < until:
            self.body_begins()
            step = session.step
            self._is_in_body = True
            try:
                yield step
            finally:
                self._is_in_body = False
            if self._detached is not None:
                self._detached.step = step + 1
                yield from self._detached.steps(until)
                return
            if self._why_over:
                raise UsageError(self._why_over)
            if session.step != step:
                raise UsageError(
                    f"the body of step {step} in steps() called commit(), but steps() commits each "
                    "body when it ends, so every other one would be left out; take commit() out, or "
                    "end steps by commit() alone, in a loop of your own"
                )
            self._commit()
        session.settle()
        self.ends()

    def ends(self) -> None:
        """The loop is over at once: a finished run gives back what it had drawn, for what follows.

        A first body that comes all the same, of a later epoch say, restores once more.
        """
        if self._restored == _NOWHERE and not self._has_ended:
            restore_random_states(self._random_states, self._device)
        self._has_ended = True

    def _commit(self) -> None:
        self._thread = threading.get_ident()
        self._session.commit()

    def body_begins(self) -> None:
        """Restore the generators in the first body; commit a body that the loop left.

        A loop leaves a body by ``break``, or by ``zip`` if the loader before ``steps()`` ends.
        """
        is_left = self._ends_bodies and not self._is_in_body
        if is_left and self._session.has_finished_step:
            self._commit()
        self._restore(_IN_BODY)

    @property
    def body(self) -> Body:
        """Return the body's step, and whether the body is over."""
        is_over = self._is_in_body and self._session.has_finished_step
        return Body(self._session.step, is_over, self._thread)

    def commit(self) -> None:
        """End a step, called by the user."""
        self._ends_bodies = False
        self._leave_generators()
        self._commit()

    def detach(self) -> DetachedLoop:
        """Remove the hooks; return a loop that goes on counting steps without the session."""
        is_left = self._ends_bodies and not self._is_in_body
        is_made = is_left and self._session.has_finished_step
        self.remove()
        self._detached = DetachedLoop(self._session.step + is_made)
        return self._detached

    def remove(self, why: str = _CLOSED) -> None:
        """Remove the hooks; a loop that continues gets an error with this reason."""
        self._why_over = why
        self._unhook()

    def _before_forward(self) -> None:
        # What a transform or a trace calls waits for the next call outside. A forward pass that activation
        # checkpointing repeats in the backward pass begins no body.
        if (
            inside(self._device)
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
        ):
            return
        is_training = any(part.training for part in self._model.modules())
        self._restore(_IN_TRAINING if is_training else _IN_EVALUATION)

    def _restore(self, place: int) -> None:
        if place > self._restored:
            self._warn_about_draws()
            restore_random_states(self._random_states, self._device)
            self._restored = place
        if place == _IN_BODY:
            self._unhook()

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _warn_about_draws(self) -> None:
        """Warn about random numbers that were drawn before the generators are restored."""
        if self._draws is None:
            return
        names = self._draws.names(may_seed=True)
        self._draws = None
        if names:
            several, was = ("s", "were") if len(names) > 1 else ("", "was")
            Code.GENERATORS_DRAWN.warn(
                f"the random generator{several} of {' and '.join(names)} {was} drawn from between "
                "attach and the first step, and restored now: an uninterrupted "
                "run drew other numbers there. If the loop trains with them, as with a batch that "
                "is fetched ahead, keep them in checkpointer.state, which attach restores, and "
                "draw only what that state lacks. A batch that is drawn at the top of the body needs only the loop "
                "over checkpointer.steps(...), which restores them there",
            )

    def _leave_generators(self) -> None:
        """The first body is over: restore generators late if it drew nothing, else keep them."""
        if self._restored == _NOWHERE and self._draws is not None:
            if not self._draws.names(may_seed=False):
                self._restore(_IN_BODY)
                return
            # Restoring them would repeat the body's numbers.
            Code.GENERATORS_NOT_RESTORED.warn(
                "the random generators were not restored, because the first step after attach drew from "
                "them and began without a forward pass of the attached model with gradients on, outside "
                "transforms of torch.func and traces: this run draws other numbers than an "
                "uninterrupted one; loop over checkpointer.steps(...), "
                "a checkpointer.dataloader(...) or an attached DataLoader, which restore them",
            )
        self._restored = _IN_BODY
        self._unhook()


class DetachedLoop:
    """Counts the steps of a loop after ``detach()``, and commits nothing.

    Attributes:
        step: Number of steps that have ended.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def steps(self, until: int) -> Iterator[int]:
        """See ``Checkpointer.steps``."""
        while self.step < until:
            step = self.step
            yield step
            self.step = step + 1

    def commit(self) -> None:
        """Count a step, ended by the user's call."""
        self.step += 1


class _Hook:
    """Hook before a forward pass; in a deep or pickled copy of the model, it does nothing."""

    __name__ = "lowdiff"  # torch.jit.script requires a name of every hook

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call

    def __call__(self, *_: object) -> None:
        if self._call is not None:
            self._call()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _hooked(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return a module and its submodules whose calls pass through Python, each once."""
    found: dict[torch.nn.Module, None] = {}
    waiting = [model]
    while waiting:
        part = waiting.pop()
        if part in found or isinstance(part, torch.jit.ScriptModule):
            continue
        if getattr(part, "_compiled_call_impl", None) is not None:
            continue  # by compile(), which compiles its hooks as well
        found[part] = None
        if getattr(part, "_orig_mod", None) is None:  # otherwise the inner module is compiled
            waiting += part.children()
    return list(found)
