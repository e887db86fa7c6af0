"""The attached training: the model's layout and how its optimizers divide it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import is_
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from lowdiff.core import devices
from lowdiff.core.layout import by_tensor, dtype_name, flat_like, laid_out, own_name
from lowdiff.errors import ConfigError, UnsupportedModel, UnsupportedOptimizer
from lowdiff.model.items import extra_state_keys
from lowdiff.model.ranks import Ranks
from lowdiff.model.replicas import Replicas
from lowdiff.model.sharding import (
    FrozenShards,
    drawing_alike,
    is_sharded,
    joined,
    local_of,
    part_of,
    told,
)
from lowdiff.recovery.images import holds
from lowdiff.recovery.replay.optimizers import (
    class_name,
    granularity,
    refuse_broken_momentum,
    refuse_foreign_state,
)
from lowdiff.recovery.state import BUFFER_ITEM, EXTRA_ITEM, FROZEN_ITEM
from lowdiff.types import Layout, OptimizerSpec

#: Packages whose wrappers around an optimizer leave its update as it is. Others, a Lookahead say,
#: have an optimizer inside as well, but do more than that one does.
_TRANSPARENT = {"accelerate", "lightning", "lightning_fabric", "pytorch_lightning"}


#: Module and attribute under which a tensor is found.
Slot: TypeAlias = "tuple[torch.nn.Module, str]"


class Parts:
    """The modules of a model, walked through again only once one was replaced, put in or taken out.

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._walk()

    def _walk(self) -> None:
        self._parts = [
            (own_name(f"{prefix}.") if prefix else "", part)
            for prefix, part in self._module.named_modules()
        ]
        self._seen = self._children()

    def _children(self) -> list[torch.nn.Module | None]:
        # Asked for each time: what a module of TorchScript gives does not follow its members.
        return [*chain.from_iterable(part._modules.values() for _, part in self._parts)]

    def buffers(self) -> Iterator[tuple[str, torch.Tensor | None, torch.nn.Module, str]]:
        """Item name, tensor, owner and attribute of every buffer, also of those that are None."""
        if not are_same(self._children(), self._seen):
            self._walk()
        for path, part in self._parts:
            for key, buffer in part._buffers.items():
                yield BUFFER_ITEM + path + key, buffer, part, key


def are_same(left: Sequence[object], right: Sequence[object]) -> bool:
    """Whether two lists hold the same objects; ``==`` would compare the elements of tensors."""
    return len(left) == len(right) and all(map(is_, left, right))


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """The attached model and optimizers, described; large because all of it is found in one look.

    Attributes:
        model: As given, perhaps wrapped in DDP.
        module: The model inside the wrappers.
        parts: Its modules.
        optimizers: As given.
        layout: Trainable parameters that an optimizer owns; with sharded ones, the shards of all ranks.
        parameters: Layout index -> parameter, of what this rank trains: in DDP, of everything.
        owner: Per entry of the layout: index of its optimizer.
        specs: One per optimizer.
        frozen: Item name -> module and attribute of a parameter that no optimizer trains.
        frozen_shards: Those of them that are sharded.
        names: Keys of the model's state dict -> parameter, item, or key within the item of extra
            states.
        device: Where the parameters live.
        ddp: The DDP wrapper, if there is one.
        replicas: The ranks that hold copies of this rank's shards, where lowdiff averages over them.
        draws: How ranks draw; see `Fence.draws`.
    """

    model: torch.nn.Module
    module: torch.nn.Module
    parts: Parts
    optimizers: tuple[torch.optim.Optimizer, ...]
    layout: Layout
    parameters: Mapping[int, torch.nn.Parameter]
    owner: tuple[int, ...]
    specs: tuple[OptimizerSpec, ...]
    frozen: Mapping[str, Slot]
    frozen_shards: FrozenShards
    names: Mapping[str, str]
    device: torch.device
    ddp: DistributedDataParallel | None
    replicas: Replicas | None = None
    draws: tuple[int, ...] = ()

    @property
    def optimizer_names(self) -> list[str]:
        """Names for messages: the class, and the place in ``attach`` where there are several."""
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers]
        return kinds if len(kinds) == 1 else [f"optimizer {i} ({k})" for i, k in enumerate(kinds)]

    @property
    def exchanged(self) -> Layout:
        """What this rank exchanges with others, and keeps a residual of: in DDP everything."""
        return self.layout if self.replicas is None else self.replicas.part.layout

    @property
    def is_on_host(self) -> bool:
        """Whether the parameters' values can be read without making the host wait."""
        return devices.may_look(self.device)

    def constants(self) -> dict[str, torch.Tensor]:
        """Item name -> tensor that no optimizer updates: buffers and frozen parameters.

        They are looked up anew, because models may assign new ones. Each is an item of its own, also
        where two names hold one tensor: either may be given another.
        """
        found = {n: buffer for n, buffer, _, _ in self.parts.buffers() if buffer is not None}
        return found | self.frozen_parameters()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters by name, buffers and frozen parameters by item name."""
        specs = self.layout.parameters
        return {specs[i].name: self.local(i) for i in self.parameters} | self.constants()

    def local(self, index: int) -> torch.Tensor:
        """Return this rank's part of a parameter, sharing its memory; the parameter itself in DDP."""
        return local_of(self.parameters[index])

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold other parameters, or other parts of them."""
        held = (*self.parameters.values(), *self.frozen_shards.parameters.values())
        return any(map(is_sharded, held))

    def frozen_parameters(self) -> dict[str, torch.Tensor]:
        """Item name -> what this rank holds of a parameter that no optimizer trains."""
        sharded = self.frozen_shards.parameters
        found = {
            name: sharded.get(name, part._parameters.get(key))
            for name, (part, key) in self.frozen.items()
        }
        return {name: local_of(p).detach() for name, p in found.items() if p is not None}

    def buffer_slots(self) -> dict[str, Slot]:
        """Item name -> module and attribute of every buffer, whether it holds a tensor or None."""
        return {name: (owner, key) for name, _, owner, key in self.parts.buffers()}

    def gradients(self, optimizer: int) -> list[torch.Tensor | None]:
        """Flat gradients in layout order; None where absent, or of another optimizer or rank."""
        found: list[torch.Tensor | None] = [None] * len(self.owner)
        for i, parameter in self.parameters.items():
            if self.owner[i] == optimizer and parameter.grad is not None:
                found[i] = flat_like(local_of(parameter.grad), self.layout.parameters[i])
        return found

    def held(self) -> list[int]:
        """Parameters that hold a gradient tensor now."""
        return [i for i, parameter in self.parameters.items() if parameter.grad is not None]

    def kept_gradients(self, stepped: Collection[int]) -> dict[int, weakref.ref[torch.Tensor]]:
        """Layout index -> gradient that a later step could use: none are zero, or of an overflow.

        Args:
            stepped: Optimizers whose gradients are not looked at.
        """
        if len(stepped) == len(self.optimizers):
            return {}
        found = {
            i: p.grad
            for i, p in self.parameters.items()
            if p.grad is not None and self.owner[i] not in stepped
        }
        local = {i: local_of(gradient) for i, gradient in found.items()}
        if not all(bool(gradient.isfinite().all()) for gradient in local.values()):
            return {}
        return {i: weakref.ref(found[i]) for i, gradient in local.items() if bool(gradient.any())}


def ddp_of(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper of a model, if there is one."""
    parts = wrappers(model)
    return next((part for part in parts if isinstance(part, DistributedDataParallel)), None)


def bare_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """The torch optimizers among what ``attach`` was given, out of accelerate's and Lightning's."""
    several = given if isinstance(given, Sequence) else (given,)
    return tuple(_bare(optimizer) for optimizer in several)


def describe(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Attached:
    """Check a model and its optimizers, and lay the model out.

    Raises:
        UnsupportedModel: For sharded modules and unusual parameters.
        UnsupportedOptimizer: If replay cannot reproduce an optimizer.
        ConfigError: If optimizers overlap, hold foreign parameters or miss trainable ones.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"attach takes one module, got a {type(model).__name__}; wrap several in one "
            'torch.nn.ModuleDict, e.g. {"generator": ..., "discriminator": ...}, and attach it '
            "with the list of their optimizers"
        )
    if not optimizers:
        raise ConfigError("attach needs the optimizer that trains the model, or a list of several")
    _refuse_fsdp1(model)
    module = wrappers(model)[-1]
    _refuse_one_name(module)
    named = {own_name(n): p for n, p in module.named_parameters()}
    name_of = {id(p): n for n, p in named.items()}
    owner_of, specs = _divided(optimizers, name_of)
    trained = {n: p for n, p in named.items() if n in owner_of and p.requires_grad}
    forgotten = [n for n, p in named.items() if p.requires_grad and n not in owner_of]
    if forgotten:
        raise ConfigError(
            f"{len(forgotten)} trainable parameters belong to no attached optimizer, among them "
            f"{forgotten[0]!r}; attach all optimizers, or freeze them with requires_grad_(False) and "
            "wrap the module anew, if it is in DistributedDataParallel"
        )
    places = sorted({str(p.device) for p in trained.values()})
    if len(places) > 1:
        raise UnsupportedModel(
            f"parameters lie on {', '.join(places)}; lowdiff copies from one device: move them to "
            "one, or train the parts in processes of their own"
        )
    layout = laid_out((part_of(name, p), local_of(p)) for name, p in trained.items())
    sharded = {
        name: parameter
        for name, parameter in named.items()
        if name not in trained and is_sharded(parameter)
    }
    frozen_specs = (part_of(name, parameter) for name, parameter in sharded.items())
    source_of = {id(p): n if n in trained else FROZEN_ITEM + n for n, p in named.items()}
    _refuse_unstorable(module)
    _refuse_sparse(module)
    ddp = ddp_of(model)
    if ddp is not None:
        _refuse_sharded_in_ddp(module)
        _compare_with_averaged(ddp, trained, name_of)
    return Attached(
        model=model,
        module=module,
        parts=Parts(module),
        optimizers=tuple(optimizers),
        layout=layout,
        parameters=dict(enumerate(trained.values())),
        owner=tuple(owner_of[spec.tensor] for spec in layout.parameters),
        specs=tuple(specs),
        frozen=_frozen_slots(module, source_of),
        frozen_shards=FrozenShards(
            Layout(tuple(frozen_specs)), {FROZEN_ITEM + n: p for n, p in sharded.items()}
        ),
        names=_state_dict_names(module, source_of),
        device=next(iter(trained.values())).device,
        ddp=ddp,
    )


def of_all_ranks(attached: Attached, ranks: Ranks) -> Attached:
    """Give a sharded training the layout of all ranks' shards; one that is not sharded as it is.

    Raises:
        UnsupportedModel: On all ranks, if their shards are not the whole model.
        UnsupportedOptimizer: If an optimizer couples the elements of a tensor that is divided.
    """
    own_shards = [told(attached.layout), told(attached.frozen_shards.layout)]
    gathered = ranks.gather(own_shards if attached.is_sharded else [])
    if not any(gathered):
        return attached
    layout = joined([trained for trained, _ in gathered])
    frozen = replace(attached.frozen_shards, layout=joined([frozen for _, frozen in gathered]))
    own = {spec.name: i for i, spec in enumerate(attached.layout.parameters)}
    owner_of = {
        s.tensor: o for s, o in zip(attached.layout.parameters, attached.owner, strict=True)
    }
    parts = {tensor: [spec.name for spec in specs] for tensor, specs in by_tensor(layout).items()}
    specs = []
    for optimizer in attached.specs:
        groups = [[p for n in names for p in parts.get(n, [n])] for names in optimizer.groups]
        _refuse_coupling(optimizer, [n for names in optimizer.groups for n in names], parts)
        specs.append(replace(optimizer, groups=tuple(map(tuple, groups))))
    return replace(
        attached,
        layout=layout,
        parameters={
            i: attached.parameters[own[spec.name]]
            for i, spec in enumerate(layout.parameters)
            if spec.name in own
        },
        owner=tuple(owner_of[spec.tensor] for spec in layout.parameters),
        specs=tuple(specs),
        frozen_shards=frozen,
    )


def alike_on(attached: Attached, rank: int) -> list[int]:
    """Return the ranks that draw the same numbers as this one, itself among them."""
    if not attached.is_sharded:
        return [rank]
    held = (*attached.parameters.values(), *attached.frozen_shards.parameters.values())
    return drawing_alike(attached.module, held, rank)


def with_draws(attached: Attached, ranks: Ranks, alike: Sequence[int]) -> Attached:
    """Say how all ranks draw.

    Args:
        attached: The training.
        ranks: All of them.
        alike: See `alike_on`.
    """
    told = [tuple(theirs) for theirs in ranks.gather(list(alike))]
    if all(len(theirs) == 1 for theirs in told):
        return attached
    numbers = {theirs: number for number, theirs in enumerate(dict.fromkeys(told))}
    return replace(attached, draws=tuple(numbers[theirs] for theirs in told))


def _refuse_coupling(
    optimizer: OptimizerSpec, tensors: Sequence[str], parts: Mapping[str, Sequence[str]]
) -> None:
    divided = next((name for name in tensors if len(parts.get(name, ())) > 1), None)
    if divided is not None and granularity(optimizer) != "element":
        raise UnsupportedOptimizer(
            f"{optimizer.class_name.rpartition('.')[2]} couples the elements of a tensor, and "
            f"{divided!r} is divided over ranks, so that no rank can step its part alone; take an "
            "optimizer that works element by element (AdamW, SGD, ...), or DistributedDataParallel"
        )


def _divided(
    optimizers: Sequence[torch.optim.Optimizer], name_of: Mapping[int, str]
) -> tuple[dict[str, int], list[OptimizerSpec]]:
    """Parameter name -> which optimizer has it, and the groups of each by name."""
    owner_of: dict[str, int] = {}
    specs = []
    for index, optimizer in enumerate(optimizers):
        groups = []
        for group in optimizer.param_groups:
            names = [_owned_name(p, name_of) for p in group["params"]]
            for name in names:
                if name in owner_of:
                    raise ConfigError(f"parameter {name!r} is in two optimizers; give it to one")
                owner_of[name] = index
            groups.append(tuple(names))
        specs.append(OptimizerSpec(class_name(optimizer), tuple(groups)))
        refuse_foreign_state(optimizer)
        refuse_broken_momentum(optimizer)
        _refuse_master_copies(optimizer, name_of)
    return owner_of, specs


def _frozen_slots(module: torch.nn.Module, source_of: Mapping[int, str]) -> dict[str, Slot]:
    """Item name -> where each frozen parameter is found; the first place of one that is tied."""
    found: dict[str, Slot] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            source = source_of.get(id(parameter), "")
            if source.startswith(FROZEN_ITEM):
                found.setdefault(source, (part, key))
    return found


def _refuse_one_name(module: torch.nn.Module) -> None:
    """See that no two tensors get one name where what `torch.compile` puts in is left out."""
    given: dict[str, str] = {}
    for name, _ in [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]:
        other = given.setdefault(own_name(name), name)
        if other != name:
            raise UnsupportedModel(
                f"{other!r} and {name!r} are one name to lowdiff, which leaves out _orig_mod, the "
                "part that torch.compile puts in; register the tensor inside the compiled module"
            )


def _refuse_fsdp1(model: torch.nn.Module) -> None:
    for part in model.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise UnsupportedModel(
                "FullyShardedDataParallel (FSDP1) flattens its parameters; shard the model by "
                "torch.distributed.fsdp.fully_shard (FSDP2), or wrap it in DistributedDataParallel"
            )


def _refuse_sharded_in_ddp(module: torch.nn.Module) -> None:
    name = next((n for n, p in module.named_parameters() if is_sharded(p)), None)
    if name is not None:
        raise UnsupportedModel(
            f"{name!r} is sharded inside DistributedDataParallel; shard over a mesh with a dimension "
            "for the copies instead: fully_shard(model, mesh=init_device_mesh(..., (copies, shards)))"
        )


def _refuse_unstorable(module: torch.nn.Module) -> None:
    for name, tensor in [*module.named_buffers(), *module.named_parameters()]:
        if tensor.is_complex():
            what = "is complex", "register torch.view_as_real(...) of it instead"
        elif tensor.layout is not torch.strided or tensor.is_nested:
            what = f"has layout {tensor.layout}", "register its indices and values, each dense"
        elif tensor.is_meta:
            what = "is on the meta device", "give it memory before attach"
        elif not holds(tensor.dtype):
            what = f"is {dtype_name(tensor.dtype)}", "register its bytes, tensor.view(torch.uint8)"
        else:
            continue
        raise UnsupportedModel(
            f"{name!r} {what[0]}, which snapshots cannot hold; {what[1]}, or keep what never "
            "changes as a plain attribute"
        )


def _refuse_sparse(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        if isinstance(part, kinds) and part.sparse and part.weight.requires_grad:
            raise UnsupportedModel(
                f"{type(part).__name__} {name!r} makes sparse gradients, which no compressor takes; "
                "build it with sparse=False: top-k compression sends as little of them"
            )


def _compare_with_averaged(
    ddp: DistributedDataParallel,
    trained: Mapping[str, torch.nn.Parameter],
    name_of: Mapping[int, str],
) -> None:
    """DDP averages for life what was trainable when it was built, and nothing else."""
    try:
        # Also DDP's own `join` goes by these buckets; no other way shows what they hold.
        buckets = ddp.reducer._get_zeros_like_grad_buckets() if hasattr(ddp, "reducer") else []
    except torch.OutOfMemoryError:  # a RuntimeError as well
        raise
    except RuntimeError as error:  # it has no zeros of a sparse layout
        raise UnsupportedModel(
            "DistributedDataParallel was built with an embedding that makes sparse gradients, which "
            "no compressor takes; build it with sparse=False, or freeze it before wrapping"
        ) from error
    averaged = {id(p): p for bucket in buckets for p in bucket.parameters()}
    del buckets  # as large as all gradients
    alone = [name for name, parameter in trained.items() if id(parameter) not in averaged]
    owned = {id(parameter) for parameter in trained.values()}
    others = [parameter for key, parameter in averaged.items() if key not in owned]
    if alone:
        what = f"does not average {alone[0]!r}, which an attached optimizer trains"
    elif others and id(others[0]) in name_of:
        what = f"averages {name_of[id(others[0])]!r}, which is frozen"
    elif others:
        what = f"averages a parameter of shape {tuple(others[0].shape)} that is not in the model any more"
    else:
        return
    raise ConfigError(
        f"DistributedDataParallel {what}: it goes by what was trainable, and not to be ignored, when "
        "it was built; wrap the module in DistributedDataParallel anew after freezing or unfreezing"
    )


def hyper_parameters(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], ...]:
    """Every group without its parameters."""
    return tuple(
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    )


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    while type(optimizer).__module__.partition(".")[0] in _TRANSPARENT:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:  # an optimizer that such a package defines
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"attach takes a torch optimizer or a list of them, got a {type(optimizer).__name__}; "
            "schedulers and the like go by name: attach(model, optimizer, scheduler=scheduler)"
        )
    return optimizer


def wrappers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model as given, what DDP, DataParallel and torch.compile wrapped, and last the user's own."""
    found = [model]
    while True:
        if isinstance(found[-1], DistributedDataParallel | torch.nn.DataParallel):
            found.append(found[-1].module)
        elif isinstance(inner := getattr(found[-1], "_orig_mod", None), torch.nn.Module):
            found.append(inner)
        else:
            return found


def _owned_name(parameter: torch.Tensor, name_of: Mapping[int, str]) -> str:
    if id(parameter) in name_of:
        return name_of[id(parameter)]
    twin = dtype_name(parameter.dtype)
    raise UnsupportedOptimizer(
        f"the optimizer holds a {twin} tensor of shape {tuple(parameter.shape)} that is no "
        "parameter of the model; if these are fp32 master copies, train fp32 parameters under "
        "torch.autocast instead: then the logged gradient is all that changes them; if the model was "
        "sharded, build its optimizer after fully_shard, which makes other parameters"
    )


def _refuse_master_copies(optimizer: torch.optim.Optimizer, name_of: Mapping[int, str]) -> None:
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if "master" in str(key) and isinstance(value, torch.Tensor):
                raise UnsupportedOptimizer(
                    f"the optimizer keeps master copies of {name_of.get(id(parameter), '?')!r}; "
                    "train fp32 parameters under torch.autocast instead"
                )


def _state_dict_names(module: torch.nn.Module, source_of: Mapping[int, str]) -> dict[str, str]:
    """Key of the model's state dict -> parameter, item, or key within the item of extra states.

    Args:
        module: The user's own model.
        source_of: Id of every parameter -> its name, or that of its item.
    """
    extra = {
        key: f"{EXTRA_ITEM}/{keys[0]}" for keys in extra_state_keys(module).values() for key in keys
    }
    by_id, by_path, unfilled = dict(source_of), dict[str, str](), dict[str, str]()
    item_of: dict[tuple[int, str], str] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        path = own_name(f"{prefix}." if prefix else "")
        for key, parameter in part._parameters.items():
            if id(parameter) in source_of:
                by_path[path + key] = source_of[id(parameter)]
        for key, buffer in part._buffers.items():
            # The item of a part with several paths is called by the first.
            item = item_of.setdefault((id(part), key), BUFFER_ITEM + path + key)
            by_path[path + key] = by_id[id(buffer)] = item
            if buffer is None and key not in part._non_persistent_buffers_set:
                unfilled[path + key] = item  # training may fill it, and then the state dict has it
    names = {}
    for given, value in module.state_dict(keep_vars=True).items():
        key = own_name(given)
        source = extra.get(key) or by_path.get(key)
        if source is None and isinstance(value, torch.Tensor):
            # A state-dict hook may call a tensor otherwise, as activation checkpointing's wrapper does.
            source = by_id.get(id(value))
        if source is not None:
            names[key] = source
    return names | unfilled
