"""The values that cross folder boundaries. No torch here: the writer process imports this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowdiff.errors import ConfigError

#: Bytes by which parameters are aligned in a slot of the residual (docs/format.md).
_ALIGNMENT = 64
#: Name of a torch dtype ("float32") -> bytes per element.
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

#: Dtypes that weights may be rounded to when they are published.
PUBLISHED_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")

Bits = npt.NDArray[np.unsignedinteger[Any]] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One trainable parameter's place in the layout, or that of one shard of it.

    Attributes:
        name: Name in the model, without wrapper prefixes such as ``module.``; of a shard with its
            global offset, ``weight@64,0``. No other entry of the layout has it.
        shape: Logical shape, of a shard its own.
        strides: Strides in elements. Offsets inside the parameter count in memory order,
            which for a channels-last weight is not the logical order.
        dtype: torch dtype name, e.g. ``"float32"``.
        offset: First element in the layout's flat address space.
        global_offset: Where this part begins in the whole tensor, one number per dimension; zeros
            where the part is the whole, which ``()`` stands for here.
        tensor: Name of the whole tensor in the model; ``""`` stands for ``name``.
        whole_shape: Shape of the whole tensor; ``()`` stands for ``shape``.
        ranks: Ranks that train it; ``()`` for all of them.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    global_offset: tuple[int, ...] = ()
    tensor: str = ""
    whole_shape: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.global_offset:
            object.__setattr__(self, "global_offset", (0,) * len(self.shape))
        if not self.tensor:
            object.__setattr__(self, "tensor", self.name)
        if not self.whole_shape:
            object.__setattr__(self, "whole_shape", self.shape)

    @property
    def is_shard(self) -> bool:
        """Whether it is a part of a larger tensor."""
        return self.shape != self.whole_shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        """First element after this parameter in the layout (exclusive)."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat address space: every trainable parameter, in a fixed order.

    Attributes:
        parameters: In the order of ``model.named_parameters()``; tied weights once.
    """

    parameters: tuple[ParameterSpec, ...]

    @property
    def elements(self) -> int:
        """Number of elements over all parameters."""
        return self.parameters[-1].stop if self.parameters else 0

    def of_dtype(self, dtype: str) -> Iterator[tuple[int, ParameterSpec]]:
        """Index and spec of every parameter of one dtype, in layout order."""
        return ((i, p) for i, p in enumerate(self.parameters) if p.dtype == dtype)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that occur, sorted."""
        return tuple(sorted({p.dtype for p in self.parameters}))


class ResidualLayout:
    """Byte ranges of every parameter inside a slot of the residual, wherever that lies."""

    def __init__(self, layout: Layout) -> None:
        self.ranges: list[tuple[int, int]] = []
        offset = 0
        for spec in layout.parameters:
            size = spec.nbytes
            self.ranges.append((offset, offset + size))
            offset += size + (-size % _ALIGNMENT)
        self.slot_bytes = max(offset, _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Facts that rebuild an optimizer without the training code.

    Attributes:
        class_name: Qualified name, e.g. ``"torch.optim.adamw.AdamW"``.
        groups: Names of the parameters of each parameter group, in the optimizer's order.
    """

    class_name: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range inside one parameter: the unit of parallel replay.

    Attributes:
        parameter: Index of the parameter in the layout.
        start: First element, counted from the parameter's own start, inclusive.
        stop: Last element, exclusive.
    """

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """One array of a payload.

    Attributes:
        name: Meaning, chosen by the compressor, e.g. ``"values/float32"``.
        coding: How the writer may shrink it without loss: ``"ascending"`` (int64, strictly
            ascending), ``"planes"`` (float bit patterns) or ``"raw"``.
        data: One-dimensional array of bit patterns; floats are stored as unsigned integers of
            their width, because NumPy knows no bfloat16.
    """

    name: str
    coding: str
    data: Bits


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """The compressed gradient of one step as one rank persists it."""

    sections: tuple[Section, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the arrays, before any coding."""
        return sum(section.data.nbytes for section in self.sections)

    def section(self, name: str) -> Section | None:
        """The section of that name, or None."""
        return next((s for s in self.sections if s.name == name), None)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer's part of a step.

    Attributes:
        stepped: False when the optimizer was not called, as after a scaler's overflow.
        consumed: Hyper-parameters of each group as ``step()`` saw them, without ``params``.
        committed: The same at commit (a scheduler has moved them since); None if equal.
        grad_scale: ``GradScaler`` scale that a fused optimizer divides by; None without one.
        found_inf: 1.0 when a fused optimizer skipped inside its kernel; None without a scaler.
    """

    stepped: bool
    consumed: tuple[dict[str, Any], ...]
    committed: tuple[dict[str, Any], ...] | None = None
    grad_scale: float | None = None
    found_inf: float | None = None

    @property
    def after(self) -> tuple[dict[str, Any], ...]:
        """Hyper-parameters of each group after the step."""
        return self.consumed if self.committed is None else self.committed


@dataclass(frozen=True, slots=True)
class AverageStep:
    """One step of a ``torch.optim.swa_utils.AveragedModel``.

    Attributes:
        updated: Whether it took in the parameters that the step left.
        function: Which of torch's averages it is: the name of the function in ``swa_utils`` that
            makes it, or ``""`` for the default.
        decay: Decay of an exponential average, else None.
        count: Number of updates before this step.
        digests: As `Differential.digests`, of what follows those parameters.
    """

    updated: bool
    function: str
    decay: float | None
    count: int
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemRef:
    """Stands in an encoded object for a tensor that is stored by itself, under this name."""

    name: str


@dataclass(frozen=True, slots=True)
class ResidualMark:
    """Names the staging slot that holds a rank's error-feedback residual of one step.

    Attributes:
        slot: Index of the slot.
        generation: Number of the residual, which the slot carries for as long as it holds that.
    """

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Whole tensors that something else than the optimizer wrote around one step, as bit patterns.

    Attributes:
        before: Layout index -> flat parameter as the optimizer found it, where that is not what the
            step before left.
        after: Layout index -> flat parameter at commit, where that is not what the optimizer left.
        averages: Name of an average -> layout index -> its flat tensor at commit, where updates of the
            average do not explain it.
    """

    before: Mapping[int, Bits] = field(default_factory=dict)
    after: Mapping[int, Bits] = field(default_factory=dict)
    averages: Mapping[str, Mapping[int, Bits]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class EarlierStep:
    """An optimizer step that another one followed in the same loop body (``optimizer_steps="any"``).

    Attributes:
        optimizers: See `Differential.optimizers`; groups of one that did not step are left out.
        absent: See `Differential.absent`.
        payload: This rank's share of the gradient; empty in a trainer, which has staged it by then.
        averages: Averages that were updated after it -> how.
        written: What something else than the optimizer wrote until the next one: ``before``, and
            ``after`` where an average took that in.
    """

    optimizers: tuple[OptimizerStep, ...]
    absent: tuple[int, ...]
    payload: Payload
    averages: Mapping[str, AverageStep]
    written: Written


@dataclass(frozen=True, slots=True, eq=False)
class Differential:
    """Everything that turns the state of ``step - 1`` into that of ``step``, as one rank stores it.

    Attributes:
        step: The step it leads to.
        incarnation: The life of the run that made it.
        rank: Rank that stored this shard.
        world_size: Number of shards of this step.
        optimizers: One entry per attached optimizer.
        absent: Layout indices of parameters whose gradient was None (not zero).
        held: Layout indices of parameters that hold a gradient tensor at commit: with
            ``zero_grad(set_to_none=False)`` a later step that does not use them finds zeros.
        payload: This rank's share of the gradient.
        items: Encoded buffers, RNG and stateful objects whose bytes changed, by name.
        residual: Where this rank's residual lies, if it lies in a staging slot.
        digests: Checksum of each parameter of this rank's share after the step, ascending by layout
            index, of the kind that `Fence.digests` names; empty where none were taken.
        state_digests: Layout index -> checksum of what the optimizer keeps of that parameter, see
            `core.digest.state_digest`: of some parameters of this rank's share, at another step of others.
        averages: Name of a stateful object that is an average of the parameters -> what it did.
        written: What something else than the optimizer wrote to this rank's share.
        earlier: Optimizer steps of this loop body before the last one, which the attributes above
            are of.
    """

    step: int
    incarnation: int
    rank: int
    world_size: int
    optimizers: tuple[OptimizerStep, ...]
    absent: tuple[int, ...]
    held: tuple[int, ...]
    payload: Payload
    items: Mapping[str, bytes] = field(default_factory=dict)
    residual: ResidualMark | None = None
    digests: tuple[int, ...] = ()
    state_digests: Mapping[int, int] = field(default_factory=dict)
    averages: Mapping[str, AverageStep] = field(default_factory=dict)
    written: Written = field(default_factory=Written)
    earlier: tuple[EarlierStep, ...] = ()

    @property
    def steps(self) -> tuple[EarlierStep | Differential, ...]:
        """All optimizer steps of the loop body, in their order; the last one is itself."""
        return (*self.earlier, self)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all its gradients, decoded."""
        return sum(step.payload.bytes for step in self.steps)


@dataclass(frozen=True, slots=True)
class Environment:
    """Facts on which the last bits of the arithmetic can depend.

    Attributes:
        default_dtype: torch dtype name.
        matmul_precision: As `torch.get_float32_matmul_precision` says; "" where it cannot tell.
    """

    device: str
    torch_version: str
    processor: str
    cpu_capability: str
    num_threads: int
    flush_denormal: bool
    mkl: str
    default_dtype: str
    matmul_precision: str


@dataclass(frozen=True, slots=True)
class Reached:
    """How far an incarnation is known to have come; its text stands in the lease.

    Attributes:
        step: It committed at least this step.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation} {self.step}"

    @classmethod
    def of(cls, text: str) -> Reached | None:
        """Read what `str` gave; None where there is nothing of it."""
        numbers = text.split()
        is_told = len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers)
        return cls(*map(int, numbers)) if is_told else None


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice among predictions of the steps that are lost.

    Attributes:
        base_step: The last step whose state is known.
        step: The step that was predicted.
        losses: Held-out loss of each predictor by its name, the last state's first; infinite where it is no number.
        refused: Why a predictor made no candidate, by its name.
        chosen: The predictor that was taken; empty if none.
        reason: In plain words.
    """

    base_step: int
    step: int
    losses: Mapping[str, float]
    refused: Mapping[str, str]
    chosen: str
    reason: str

    def __str__(self) -> str:
        first, last = self.base_step + 1, self.step
        lost = f"step {last} is lost" if first == last else f"steps {first} to {last} are lost"
        if not self.chosen:
            return f"{lost}, and are made again: {self.reason}"
        return f"{lost}; inexact since step {last}, predicted by {self.chosen}: {self.reason}"

    def document(self) -> dict[str, Any]:
        """As JSON content; a loss that is no number becomes None."""
        losses = {n: loss if math.isfinite(loss) else None for n, loss in self.losses.items()}
        return {**asdict(self), "losses": losses}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a history that began with weights alone took them from.

    Attributes:
        run_id: The run that had them: this one, or another; "" if there was nothing to take.
        incarnation: The incarnation whose they were; None for nothing.
        step: The step; None for nothing.
    """

    run_id: str = ""
    incarnation: int | None = None
    step: int | None = None


#: Names of the ways to protect a run's steps; what each does is said in ``lowdiff/protect``.
STRATEGIES = ("log", "gradients", "replica", "survivors")
#: What checksums of a step's parameters can be: CRC-32C, or sums as of `lowdiff.core.sums`.
DIGESTS = ("crc32c", "sum64")


@dataclass(frozen=True, slots=True)
class Fence:
    """One rank's durable statement that an incarnation begins.

    Records of the parent beyond ``last_of_parent`` are void once every rank's fence exists.

    Attributes:
        incarnation: Number of this life of the run, from 0.
        parent: Incarnation it continues, None for the first.
        base_step: Step it starts from.
        compressor: Name and settings of the compressor.
        names: Keys of ``model.state_dict()`` -> name of the parameter or item behind each.
        life: Random, the same on all ranks: tells this life from one that went on elsewhere, under
            the same number and from the same step.
        strategy: What keeps its steps, one of `STRATEGIES`.
        version: Of lowdiff; "" for one that did not tell.
        stateful: Names of the user's stateful objects -> their classes.
        averages: Those of them that average parameters, and are replayed -> names of these.
        constants: Content hash of the frozen parameters that its snapshots share; "" without.
        staging: Where this rank's staging of all runs lies, without symbolic links.
        frozen_shards: Of all ranks, of frozen parameters that are sharded: each rank keeps its own as items.
        lost_tail: What was decided about lost steps where the user had them predicted; None where nothing was.
        built: Settings of optimizers and attached objects as the script of rank 0 built them, by name.
        origin: Where a history without a parent took its weights from; None where it was not told to take any.
        draws: Per rank, a number: ranks with the same one compute one replica of the model together, and draw
            alike, as those of tensor parallelism do. Empty: each draws for itself.
        digests: What the checksums of its steps are, one of `DIGESTS`.
    """

    run_id: str
    incarnation: int
    parent: int | None
    base_step: int
    rank: int
    world_size: int
    environment: Environment
    layout: Layout
    optimizers: tuple[OptimizerSpec, ...]
    compressor: Mapping[str, Any]
    names: Mapping[str, str]
    life: str
    strategy: str
    version: str = ""
    stateful: Mapping[str, str] = field(default_factory=dict)
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: str = ""
    staging: str = ""
    frozen_shards: Layout = Layout(())
    lost_tail: Decision | None = None
    origin: Origin | None = None
    built: Mapping[str, str] = field(default_factory=dict)
    draws: tuple[int, ...] = ()
    digests: str = "crc32c"

    @property
    def predicted(self) -> Decision | None:
        """How the state that it starts from was predicted; None if it is the parent's own, bit for bit."""
        return self.lost_tail if self.lost_tail is not None and self.lost_tail.chosen else None

    @property
    def last_of_parent(self) -> int:
        """The parent's last valid step: its base, or the step that this was predicted from."""
        return self.base_step if self.predicted is None else self.predicted.base_step

    @property
    def logs_steps(self) -> bool:
        """Whether every step becomes durable: not where gradients stay in memory, a replica uses them up, or none are kept."""
        return self.strategy == "log"

    @property
    def stages_steps(self) -> bool:
        """Whether every step is in staging memory, where it outlives the processes."""
        return self.strategy != "survivors"


def whole_number(name: str, value: object) -> int:
    """Return a number that the user gave.

    Raises:
        ConfigError: If it is none, or none that 64 bits hold.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if -(1 << 63) <= number < 1 << 63:
            return number
    raise ConfigError(f"{name} is a whole number, got {value!r}")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps of a run stay; a step stays if any rule keeps it.

    The *window* are the newest snapshots and every step after the oldest of them. The newest
    snapshot, what is after it, and pinned steps stay whatever the rules say.

    Attributes:
        snapshots: The window holds at least so many of the newest snapshots; None for all.
        every_steps: Each step that is a multiple of this stays for ever; None for no such steps.
            The trainer takes a snapshot at each, which then stays alone, without differentials.
        age_hours: The window also holds every snapshot younger than this.
        total_bytes: The window shrinks until all that stays, of all ranks, fits into so many
            bytes. Kept and pinned steps count but never go.

    Raises:
        ConfigError: If a value cannot work.
    """

    snapshots: int | None = 2
    every_steps: int | None = None
    age_hours: float | None = None
    total_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("snapshots", "every_steps"):
            if getattr(self, name) is not None:
                whole_number(f"retention {name}", getattr(self, name))
        if self.snapshots is not None and self.snapshots < 1:
            raise ConfigError(
                f"retention keeps at least 1 snapshot, got {self.snapshots}; None keeps all"
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"every_steps counts steps, at least 1, got {self.every_steps}")
        if self.age_hours is not None and not 0 < self.age_hours < math.inf:
            raise ConfigError(f"age_hours must be positive and finite, got {self.age_hours}")
        if self.total_bytes is not None and self.total_bytes < 1:
            raise ConfigError(f"total_bytes must be positive, got {self.total_bytes}")

    def last_kept_step(self, first: int, last: int) -> int | None:
        """Largest step in ``first ... last``, inclusive, that is kept for ever; None for none."""
        if self.every_steps is None:
            return None
        step = last - last % self.every_steps
        return step if step >= max(first, 1) else None


@dataclass(frozen=True, slots=True)
class Publisher:
    """How the weights of a run are published, step by step, for those who serve them; see docs/publish.md.

    Attributes:
        target: Folder or URL of an object store, for this run alone.
        dtype: Floating-point tensors are rounded to this dtype, as ``Tensor.to`` does; a ``torch.dtype`` or its name.
            None leaves them as they are.
        every: A version for each multiple of so many steps.
        anchor_every: Every so-manieth version is an anchor, which holds all weights.
        keep_anchors: So many anchors stay, with the versions after them.
        names: Gives a tensor's name in the published weights for its name in ``model.state_dict()``, one to one; None
            leaves it out. Called once for each tensor, in ``attach``.
        durable: Whether a step is published once it is on a disk, instead of once it is committed. Needs a log.

    Raises:
        ConfigError: If a value cannot work.
    """

    target: str | Path
    dtype: Any = "bfloat16"
    every: int = 1
    anchor_every: int = 100
    keep_anchors: int = 2
    names: Callable[[str], str | None] | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "anchor_every", "keep_anchors"):
            if whole_number(f"publish {name}", getattr(self, name)) < 1:
                raise ConfigError(f"publish {name} counts from 1, got {getattr(self, name)}")
        if not isinstance(self.target, str | Path) or not str(self.target):
            raise ConfigError(f"publish target is a folder or a URL, got {self.target!r}")
        if self.dtype is not None and self.dtype_name not in PUBLISHED_DTYPES:
            raise ConfigError(
                f"publish dtype is one of {', '.join(PUBLISHED_DTYPES)}, or None, got {self.dtype!r}"
            )
        if self.names is not None and not callable(self.names):
            raise ConfigError(f"publish names is a function of a name, got {self.names!r}")

    @property
    def dtype_name(self) -> str | None:
        """The name of the dtype, without ``torch.``."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")
