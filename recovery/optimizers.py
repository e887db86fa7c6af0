"""Which optimizers can be replayed, and in what pieces.

One line per torch optimizer. ``"element"``: the update of an element depends on that element
alone, so blocks replay independently. ``"tensor"``: it couples the elements of one tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowdiff.errors import UnsupportedOptimizer
from lowdiff.types import OptimizerSpec

GRANULARITY: Mapping[str, str] = {
    "torch.optim.adadelta.Adadelta": "element",
    "torch.optim.adagrad.Adagrad": "element",
    "torch.optim.adam.Adam": "element",
    "torch.optim.adamax.Adamax": "element",
    "torch.optim.adamw.AdamW": "element",
    "torch.optim.asgd.ASGD": "element",
    "torch.optim.nadam.NAdam": "element",
    "torch.optim.radam.RAdam": "element",
    "torch.optim.rmsprop.RMSprop": "element",
    "torch.optim.rprop.Rprop": "element",
    "torch.optim.sgd.SGD": "element",
    "torch.optim.Adafactor": "tensor",
    "torch.optim.Muon": "tensor",
}

#: State entries that hold one number for the whole parameter, whatever the parameter's shape.
SCALAR_STATE = frozenset({"step", "eta", "mu", "mu_product"})


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Qualified name of the optimizer's class.

    Raises:
        UnsupportedOptimizer: If it cannot be replayed.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in GRANULARITY:
        known = ", ".join(sorted(n.rsplit(".", 1)[1] for n in GRANULARITY))
        raise UnsupportedOptimizer(
            f"{name} cannot be replayed from logged gradients: lowdiff knows {known}; "
            "use one of these"
        )
    return name


def settle_kernels() -> None:
    """Make torch's CPU kernels choose their implementation now, on one thread.

    MKL chooses at the first call. If two threads make it at once, as the chunks of the first
    optimizer step do, one of them may run a kernel that is exact to a few digits only. Measured on
    two busy cores: ``sqrt`` of the first step was wrong by 1e-4 in half a tensor in 9 of 60
    processes, and in none of 66 after this call.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(64, dtype=dtype).sqrt()  # too short to be shared out over threads


def granularity(spec: OptimizerSpec) -> str:
    """``"element"`` or ``"tensor"``.

    Raises:
        UnsupportedOptimizer: If the run used an optimizer that this lowdiff does not know.
    """
    if spec.class_name not in GRANULARITY:
        raise UnsupportedOptimizer(
            f"the run was trained with {spec.class_name}, which this lowdiff cannot replay"
        )
    return GRANULARITY[spec.class_name]


def build(
    spec: OptimizerSpec, groups: Sequence[tuple[dict[str, Any], list[torch.nn.Parameter]]]
) -> torch.optim.Optimizer:
    """Construct the run's optimizer class over some pieces of its parameters.

    Args:
        spec: Which class.
        groups: Hyper-parameters and parameters of each group; the hyper-parameters may hold
            keys the constructor does not take, such as a scheduler's ``initial_lr``.
    """
    module, _, name = spec.class_name.rpartition(".")
    kind = _torch_class(module, name)
    accepted = set(inspect.signature(kind.__init__).parameters) - {"self", "params"}
    first = {k: v for k, v in groups[0][0].items() if k in accepted}
    optimizer: torch.optim.Optimizer = kind(
        [{**hyper, "params": parameters} for hyper, parameters in groups], **first
    )
    return optimizer


def _torch_class(module: str, name: str) -> Any:
    # Looked up among torch's own classes only: a run folder names nothing else to import.
    for candidate in vars(torch.optim).values():
        if inspect.isclass(candidate) and (candidate.__module__, candidate.__name__) == (
            module,
            name,
        ):
            return candidate
    raise UnsupportedOptimizer(f"this torch {torch.__version__} has no {module}.{name}")
