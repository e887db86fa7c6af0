"""Noticing that the model or the optimizer that trains is not the one that was attached.

What was attached is what steps record: a parameter that took the place of another one, or an
optimizer for a new phase, would train unrecorded.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowdiff.core.layout import own_name
from lowdiff.errors import UsageError
from lowdiff.model.binding import Attached
from lowdiff.model.items import extra_state_keys

#: What to do with a model or optimizer that is not the attached one.
_ATTACH_ANEW = (
    "a run records the objects that were attached, so this step is not committed: close this "
    "checkpointer, wrap the module anew if it is in DDP, build its optimizer, and attach both as "
    "they are now to a checkpointer with a new run folder, or to one with this folder by "
    'attach(..., restore="model"), which counts from step 0'
)


class AttachedObjects:
    """The modules, parameters and optimizers of one session; `check` sees that they still train.

    Modules without parameters may be replaced.
    """

    def __init__(self, attached: Attached) -> None:
        """Remember the objects, and watch the optimizers of this process until `remove`."""
        self._attached = attached
        self._names = _parameters_by_path(attached.module)
        self._extra = set(extra_state_keys(attached.module))
        self._look()
        self._own = set(map(id, attached.optimizers))
        #: Optimizers whose step runs now, outermost first.
        self._stepping: list[torch.optim.Optimizer] = []
        self._foreign: str | None = None
        #: Whether the step that trains now was refused, so that it stays uncommitted.
        self.has_refused = False
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Stop watching the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def check(self) -> None:
        """See, before a step is committed, that it is the attached objects that trained.

        Raises:
            UsageError: Naming the parameter, module or optimizer that took another's place.
        """
        self._stepping = []  # a step that raised never ended
        self.has_refused = False
        if self._foreign is not None:
            self._refuse(self._foreign)
        self._check_model()

    def _check_model(self) -> None:
        now = [*chain.from_iterable(self._views)]
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            self._look_closely()

    def _look(self) -> None:
        """Remember which objects every module holds now."""
        parts = list(self._attached.model.modules())
        # These follow their dicts, and asking them for all costs little.
        self._views = [d.values() for part in parts for d in (part._parameters, part._modules)]
        self._seen = [*chain.from_iterable(self._views)]

    def _refuse(self, what: str) -> NoReturn:
        self.has_refused = True
        raise UsageError(f"{what}; {_ATTACH_ANEW}")

    def _look_closely(self) -> None:
        """Something was replaced, put in or taken out: go through all parameters by name."""
        now = _parameters_by_path(self._attached.module)
        for name, was in self._names.items():
            if now.get(name) is was:
                continue
            moved = next((other for other, parameter in now.items() if parameter is was), None)
            how = "assigned anew, by its module or by load_state_dict(assign=True), or taken out?"
            if moved is not None:
                how = f"that is found as {moved!r} now"
            self._refuse(f"{name!r} is not the parameter any more that was attached ({how})")
        new = next((name for name in now if name not in self._names), None)
        if new is not None:
            self._refuse(f"parameter {new!r} was added to the model after attach")
        changed = self._extra.symmetric_difference(extra_state_keys(self._attached.module))
        if changed:
            kind = type(next(iter(changed))).__name__
            self._refuse(f"a {kind}, which keeps extra state, was put in or taken out after attach")
        self._names = now
        self._look()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return  # which the attached optimizers refuse
        if id(optimizer) in self._own:
            self._stepping = [optimizer]  # those around it, as SAM and Lookahead are, lead to it
            # Not only at commit: DDP leaves gradients as they are where a parameter is missing, which
            # would be said instead.
            self._check_model()
        elif self._held_by(optimizer) is not None:
            self._stepping.append(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not any(other is optimizer for other in self._stepping):
            return  # it has none of these parameters, or an attached one stepped within
        while self._stepping.pop() is not optimizer:
            pass  # that one's step raised
        # What steps within an attached optimizer is a part of its step.
        if id(optimizer) not in self._own and not self._stepping:
            self._foreign = (
                f"{self._held_by(optimizer)!r} was stepped by a {type(optimizer).__name__} that is "
                "not attached, whose state and hyper-parameters no step records"
            )
            self._refuse(self._foreign)

    def _held_by(self, optimizer: torch.optim.Optimizer) -> str | None:
        """A parameter of the model that an optimizer would step, if there is one."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return next((name for name, p in self._names.items() if id(p) in held), None)


def _parameters_by_path(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Every parameter under each of its names; one that is tied has several."""
    return {own_name(n): p for n, p in module.named_parameters(remove_duplicate=False)}
