"""Which optimizers can be replayed, and in what pieces.

One line per torch optimizer. ``"element"``: the update of an element depends on that element
alone, so blocks replay independently. ``"tensor"``: it couples the elements of one tensor.
``"whole"``: it couples tensors. Others are registered with one call, `register_optimizer`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist

from lowdiff.core import devices
from lowdiff.core.nested import each_tensor
from lowdiff.errors import ConfigError, UnsupportedOptimizer
from lowdiff.recovery.state import SCALAR_STATE
from lowdiff.types import OptimizerSpec

Granularity = Literal["element", "tensor", "whole"]

GRANULARITY: dict[str, Granularity] = {
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

#: Those of `SCALAR_STATE` that torch keeps on the host.
_COUNTERS = frozenset({"step", "mu_product"})

_registered: dict[str, type[torch.optim.Optimizer]] = {}


def register_optimizer(
    kind: type[torch.optim.Optimizer],
    granularity: Granularity = "whole",
    *,
    scalar_state: Iterable[str] = (),
) -> None:
    """Let lowdiff replay an optimizer that torch does not have, in training and in recovery.

    Its step must be a function of gradients, hyper-parameters and state alone: no closure, no random
    numbers, no counter of its own, no exchange with other ranks. Its constructor takes parameter
    groups or a flat list of parameters, and its hyper-parameters by the names they have in the
    groups. ``attach`` builds it once as replay will, and some steps of every training are replayed and
    compared, parameters and state; what differs is refused by name at that step.

    Args:
        kind: The class itself, not a subclass of it.
        granularity: ``"element"`` if an element's update depends on that element alone,
            ``"tensor"`` if on its tensor, ``"whole"`` if on several tensors: always right, slow.
        scalar_state: State entries that hold one number per parameter, however many elements that
            has. Only parameters of a single element leave any doubt; of those, ``step``, ``eta``,
            ``mu`` and ``mu_product`` are taken for such numbers anyway.

    Raises:
        ConfigError: If ``kind`` is no optimizer class, one of torch's own, or a local class, or
            the granularity is another word.
    """
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"register_optimizer takes an optimizer class, got {kind!r}")
    name = _qualified(kind)
    if granularity not in get_args(Granularity):
        raise ConfigError(
            f"granularity of {name} is one of {get_args(Granularity)}, got {granularity!r}"
        )
    if name in GRANULARITY and name not in _registered:
        raise ConfigError(f"{name} is known already, by {GRANULARITY[name]}; leave the call out")
    GRANULARITY[name] = granularity
    SCALAR_STATE.update(scalar_state)
    _registered[name] = kind


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Qualified name of the optimizer's class.

    Raises:
        UnsupportedOptimizer: If it cannot be replayed.
    """
    name = _qualified(type(optimizer))
    if name not in GRANULARITY:
        known = ", ".join(sorted(n.rsplit(".", 1)[1] for n in GRANULARITY))
        raise UnsupportedOptimizer(
            f"{name} cannot be replayed from logged gradients: lowdiff knows {known}; use one of "
            "these, or tell lowdiff how it works: lowdiff.register_optimizer("
            f"{name.rpartition('.')[2]}, 'element') if every element is updated on its own, "
            "'tensor' or 'whole' if not"
        )
    return name


def refuse_foreign_state(optimizer: torch.optim.Optimizer) -> None:
    """See that all that an optimizer keeps belongs to a parameter.

    Raises:
        UnsupportedOptimizer: Naming what does not, which snapshots have no place for.
    """
    for key, own in optimizer.state.items():
        is_empty = isinstance(own, dict) and not own  # a mere look at a defaultdict makes it
        if not isinstance(key, torch.Tensor) and not is_empty:
            raise UnsupportedOptimizer(
                f"{_qualified(type(optimizer))} keeps state[{key!r}], which belongs to no parameter "
                "and would be lost; keep it in the groups, e.g. group["
                f"{str(key)!r}], which are stored with every step, or in the state of a parameter"
            )


def refuse_broken_momentum(optimizer: torch.optim.Optimizer) -> None:
    """See that a fused SGD keeps the momentum that its formula says.

    For bfloat16 and float16 on CPUs the kernel of PyTorch 2.10 to 2.13, and of older ones, does not: parameters
    stay as they are, and the buffer holds other numbers, some of which differ from one equal step to the next.

    Raises:
        UnsupportedOptimizer: If it does not here; nothing could replay such a step.
    """
    for group in optimizer.param_groups if type(optimizer) is torch.optim.SGD else ():
        trained = [p for p in group["params"] if p.requires_grad and devices.may_look(p)]
        dtypes = {p.dtype for p in trained if p.element_size() < 4}
        if not (dtypes and group.get("fused") and group["momentum"]):
            continue
        for dtype in dtypes:
            weight = torch.nn.Parameter(torch.zeros(64, dtype=dtype, device="cpu"))
            tried = torch.optim.SGD([weight], lr=0.0, momentum=0.5, fused=True)
            gradient = torch.arange(64.0, device="cpu").to(dtype)
            for _ in range(2):
                weight.grad = gradient.clone()
                tried.step()
            # All of these numbers are exact in either width.
            if not torch.equal(tried.state[weight]["momentum_buffer"], 1.5 * gradient):
                raise UnsupportedOptimizer(
                    f"SGD(fused=True, momentum=...) in {dtype} is broken in PyTorch {torch.__version__}: on a "
                    "CPU parameters do not move, and the momentum differs between equal runs, so that no step "
                    "could be repeated; leave fused out, or update PyTorch (2.15 has it right)"
                )


def take_scales_by_groups(optimizer: torch.optim.Optimizer) -> None:
    """Let a gradient scaler do with an optimizer what the ``fused`` of its groups asks for.

    torch's constructors set this by what they are given, and a scaler goes by it alone: it leaves
    unscaling to the optimizer, whose other kernels refuse that.
    """
    fused = [group.get("fused") for group in optimizer.param_groups]
    if all(fused):
        vars(optimizer)["_step_supports_amp_scaling"] = True
    else:
        vars(optimizer).pop("_step_supports_amp_scaling", None)


def is_registered(spec: OptimizerSpec) -> bool:
    """Whether `register_optimizer` made the class known: it is none of torch's own."""
    return spec.class_name in _registered


def needs_live_threads(specs: Iterable[OptimizerSpec], num_threads: int) -> bool:
    """Whether replay needs the live run's threads for the bits of some optimizer's state.

    Products of matrices may round otherwise on another number of threads. Where torch's own
    optimizers do that, the parameters' checksums tell. A registered one may keep such a product for
    later steps, and its state has a checksum at some steps only.
    """
    return num_threads > 1 and any(
        is_registered(spec) and granularity(spec) != "element" for spec in specs
    )


def refuse_what_a_replica_lacks(
    specs: Sequence[OptimizerSpec], imports: Sequence[str], world_size: int
) -> None:
    """See that a replica, which imports only what it is told to, can step every optimizer.

    Args:
        specs: The run's optimizers.
        imports: Names of the modules that it imports; they are imported here.
        world_size: Number of ranks, each with a replica of its share.

    Raises:
        ConfigError: If a module cannot be imported.
        UnsupportedOptimizer: Naming the optimizer that a replica could not step.
    """
    import_modules(imports)
    for spec in specs:
        if not is_registered(spec):
            continue
        kind = _registered[spec.class_name]
        otherwise = "or give a compressor, e.g. Checkpointer(..., compressor=TopK(density=0.01))"
        if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
            raise UnsupportedOptimizer(
                f"{spec.class_name} is defined in the script itself or in a function, from where the "
                "replica process of LowDiff+ cannot import it; move the class to a module and give "
                f"Checkpointer(..., imports=[MODULE]), {otherwise}"
            )
        if not imports:
            raise UnsupportedOptimizer(
                f"{spec.class_name} was made known with lowdiff.register_optimizer, and the replica "
                "process of LowDiff+ imports nothing unasked; name the module of the class, "
                f"Checkpointer(..., imports=[{kind.__module__!r}]), {otherwise}"
            )
        if granularity(spec) == "whole" and world_size > 1:
            raise UnsupportedOptimizer(
                f"{spec.class_name} is registered as 'whole': it couples tensors, and each of the "
                f"{world_size} replicas of LowDiff+ holds a share of them; register it as 'tensor' "
                f"if it does not, {otherwise}"
            )


def registrations(specs: Iterable[OptimizerSpec]) -> list[tuple[str, str, str]]:
    """Module, qualified name and granularity of those that `register_optimizer` made known."""
    kinds = {spec.class_name: _registered[spec.class_name] for spec in specs if is_registered(spec)}
    return [(k.__module__, k.__qualname__, GRANULARITY[name]) for name, k in kinds.items()]


def register_again(known: Iterable[Sequence[str]], scalar_state: Iterable[str]) -> None:
    """Make the trainer's registered classes known to another process of it.

    Args:
        known: What `registrations` gave the trainer.
        scalar_state: The trainer's names of numbers.

    Raises:
        ConfigError: If a module of theirs cannot be imported.
    """
    SCALAR_STATE.update(scalar_state)
    for module, name, how in known:
        if f"{module}.{name}" not in _registered:
            import_modules([module])
            kind = attrgetter(name)(sys.modules[module])
            register_optimizer(kind, cast(Granularity, how))


def import_modules(names: Iterable[str]) -> None:
    """Import modules that call `register_optimizer`.

    Raises:
        ConfigError: Naming the one that cannot be imported, and why.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"the module {name!r}, named to register optimizers, cannot be imported "
                f"({type(error).__name__}: {error}); it is looked for where Python looks for "
                "modules: install it, or put its folder into PYTHONPATH"
            ) from error


def settle_kernels() -> None:
    """Make torch's CPU kernels choose their implementation now, on one thread.

    MKL chooses at the first call. If two threads make it at once, as the chunks of the first
    optimizer step do, one of them may run a kernel that is exact to a few digits only. Measured on
    two busy cores: ``sqrt`` of the first step was wrong by 1e-4 in half a tensor in 9 of 60
    processes, and in none of 66 after this call.
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(64, dtype=dtype, device="cpu").sqrt()  # too short to be shared out over threads


@contextmanager
def without_default_group(specs: Iterable[OptimizerSpec]) -> Iterator[None]:
    """Within it ``torch.distributed`` is not initialized, as in a process that recovers by itself.

    An optimizer of a third party that exchanges with other ranks in its step fails there, instead of
    waiting for ranks that replay something else. Groups that are given by themselves go on to work.

    Args:
        specs: The optimizers that are built or stepped; without one of a third party, nothing changes.
    """
    is_needed = dist.is_available() and any(map(is_registered, specs))
    world = dist.GroupMember.WORLD if is_needed else None
    if world is None:
        yield
        return
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = world


def granularity(spec: OptimizerSpec) -> Granularity:
    """How finely the optimizer's parameters may be cut.

    Raises:
        UnsupportedOptimizer: If the run used an optimizer that this lowdiff does not know.
    """
    if spec.class_name not in GRANULARITY:
        raise UnsupportedOptimizer(
            f"the run was trained with {spec.class_name}, which this process does not know; call "
            "lowdiff.register_optimizer with that class, as the training script did, and then "
            "lowdiff.recover. On the command line: --import MODULE, a module that makes that call"
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
    kind = _class_of(spec.class_name)
    accepted = dict(inspect.signature(kind.__init__).parameters)
    first = {k: v for k, v in groups[0][0].items() if k in accepted.keys() - {"self", "params"}}
    # Only constructors look at values. A group may have been given others, or a schedule may
    # have led to them: Nesterov momentum that begins at 0, say. Groups hold them all the same.
    needed = {k: v for k, v in first.items() if accepted[k].default is inspect.Parameter.empty}

    def made(arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        own = [{**hyper, "params": parameters} for hyper, parameters in groups]
        optimizer: torch.optim.Optimizer = kind(own, **arguments)
        return optimizer

    def made_flat(arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind([p for _, own in groups for p in own], **arguments)
        # It may have divided or sorted them by itself: in the live run it did so before attach.
        optimizer.param_groups[:] = [{**hyper, "params": own} for hyper, own in groups]
        return optimizer

    try:
        return made(first)
    except (AssertionError, RuntimeError, ValueError):
        if not is_registered(spec):
            return made(needed)
    except (AttributeError, LookupError, TypeError):
        if not is_registered(spec):
            raise
    for attempt, arguments in ((made, needed), (made_flat, first)):
        with suppress(AssertionError, AttributeError, LookupError, TypeError, ValueError):
            return attempt(arguments)
    return made_flat(needed)


def independent(
    spec: OptimizerSpec, hyper: dict[str, Any], dtypes: Iterable[torch.dtype], device: torch.device
) -> dict[str, Any]:
    """Hyper-parameters with which parts of a group step apart as the whole of it does.

    Where Adafactor gets no ``eps[0]``, torch takes that of the first parameter it comes to, and
    keeps it for the rest of the group, whatever their dtypes.

    Args:
        spec: The optimizer's class.
        hyper: The group's hyper-parameters.
        dtypes: Of all its parameters that have a gradient, in their order.
        device: Where they are.
    """
    if spec.class_name != "torch.optim.Adafactor" or hyper["eps"][0] is not None:
        return hyper
    ordered = list(dict.fromkeys(dtypes))
    if hyper.get("foreach") and ordered:
        # Only torch knows in which order kernels over lists of tensors come to each dtype.
        each: list[torch.Tensor | None] = [torch.empty(0, dtype=d, device=device) for d in ordered]
        grouped = torch.optim.Optimizer._group_tensors_by_device_and_dtype([each])
        ordered = [dtype for _, dtype in grouped if dtype is not None]
    first = next(iter(ordered), None)
    return hyper if first is None else {**hyper, "eps": (torch.finfo(first).eps, hyper["eps"][1])}


def usable_on(device: torch.device, hyper: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters with which a group can be stepped on a device.

    What CUDA graphs ask for, torch refuses on a CPU, and then also ``foreach`` with a rate that is
    a tensor. On an accelerator tensors lie where they did in training: kernels of which the host knows
    the divisor round otherwise.
    """
    if not devices.may_look(device):
        return {key: placed(value, device) for key, value in hyper.items()}
    if not hyper.get("capturable"):
        return hyper
    return {**hyper, "capturable": False, "foreach": False}


def placed(value: Any, device: torch.device) -> Any:
    """A hyper-parameter with the tensors in it that belong on an accelerator put on a device."""
    return each_tensor(value, lambda _, tensor: devices.put_back(tensor, device))


def placed_scalar(
    key: str, value: torch.Tensor, hyper: Mapping[str, Any], parameter: torch.Tensor
) -> torch.Tensor:
    """A copy of a state entry that is one number, on the device where its optimizer wants it.

    torch keeps counters on the host, where reading them costs nothing, unless the kernel itself
    reads them.
    """
    in_kernel = hyper.get("fused") or hyper.get("capturable")
    on_host = key in _COUNTERS and not in_kernel
    return value.detach().to("cpu" if on_host else parameter.device, copy=True)


def _class_of(class_name: str) -> Any:
    # Looked up among torch's own classes and registered ones only: a run folder names nothing
    # else to import.
    if class_name in _registered:
        return _registered[class_name]
    for candidate in vars(torch.optim).values():
        if inspect.isclass(candidate) and _qualified(candidate) == class_name:
            return candidate
    raise UnsupportedOptimizer(
        f"this torch {torch.__version__} has no {class_name}; recover with the torch of the training"
    )
