"""What a step does on an accelerator, counted without one: launches, bytes, waits of the host.

    python -m benches.bench_device_ops --out DIR [--smoke]

The real code trains GPT-2 small (124.4 million elements in 148 tensors, DDP's buckets of 25 MB) on a device that only
counts (`counted_device`): attach, steps, a snapshot. What cannot run without a driver is stood in for:
gradients lie in place, DDP is a shell with its buckets, autocast and scaler are what they leave behind (gradients in
float32, a scale, an overflow flag). Arms: top-k 1 %, PowerSGD(4), gradients, survivors; PowerSGD also with clipping;
top-k with clipping, a gradient scaler, fused AdamW, both, rounded values, two backward passes, a batch norm and a learning
rate that lie on the device, and its hook among eight ranks.

``PREFIX_launches`` and the like are those of one steady step; ``mean_`` those of all counted steps, of which one takes
a snapshot. What of it is copied beside the next step is ``trailing_``, also in the mean. A predicted time is the larger of launches by `LAUNCH_SECONDS` and bytes by `MEMORY_BYTES_PER_SECOND`, and the
link's bytes behind it: it says what a count can say, and neither what queues behind what nor what Python takes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches import ending
from benches.counted_device import DEVICE, TRAILING, CountedDevice, Tally
from benches.gpt import GPT, GPTConfig
from benches.gpu.training import MODELS
from benches.harness import BLUE, Result, arguments, machine, write
from benches.hooked import Hooked
from benches.kernel_bytes import measured
from lowdiff.commit.session import Session
from lowdiff.commit.staging import Staging
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.step.ddp_hook import HookState

#: DDP's: a small first bucket, so that the exchange starts early.
BUCKET_BYTES = (1 << 20, 25 << 20)
#: Steps that are not counted: audits, and the first optimizer step.
WARM_UP = 4
#: Those that are; in a smoke run fewer, and of fewer arms.
STEPS, SMOKE_STEPS = 17, 3
SMOKE_ARMS = ("", "powersgd_", "gradients_", "survivors_", "scaled_", "buffers_")
#: Of the H200 in docs/results/gpu_first.json.
MEMORY_BYTES_PER_SECOND, LINK_BYTES_PER_SECOND = 4.02e12, 55e9
#: The usual figure for starting a kernel from eager PyTorch.
LAUNCH_SECONDS = 6e-6
#: Parts of lowdiff's, in the order of a step; ``user`` is what a loop does without lowdiff.
PARTS = ("hook", "pre-hook", "post-hook", "commit", "snapshot", TRAILING)
#: Those of a step with a snapshot, and of the next one.
_OF_SNAPSHOT = ("snapshot", TRAILING)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        options: Of the Checkpointer.
        clips: Whether gradients are clipped.
        scales: Whether there is a gradient scaler.
        fused: Whether AdamW is.
        passes: Backward passes of a step.
        lies_there: Whether statistics of a batch norm and the learning rate lie on the device as well.
    """

    options: Mapping[str, Any]
    clips: bool = False
    scales: bool = False
    fused: bool = False
    passes: int = 1
    lies_there: bool = False


_TOP_K: Mapping[str, Any] = {"compressor": TopK(0.01)}
#: Prefix of figures -> arm.
ARMS = {
    "": Arm(_TOP_K),
    "powersgd_": Arm({"compressor": PowerSGD(4)}),
    "gradients_": Arm({"strategy": "gradients"}),
    "survivors_": Arm({"strategy": "survivors"}),
    "powersgd_clipped_": Arm({"compressor": PowerSGD(4)}, clips=True),
    "clipped_": Arm(_TOP_K, clips=True),
    "scaled_": Arm(_TOP_K, scales=True),
    "fused_": Arm(_TOP_K, fused=True),
    "fused_scaled_": Arm(_TOP_K, scales=True, fused=True),
    "rounded_": Arm({"compressor": TopK(0.01, value_dtype=torch.bfloat16)}, clips=True),
    "accumulated_": Arm(_TOP_K, passes=2),
    "buffers_": Arm(_TOP_K, lies_there=True),
    "binned_": Arm({"compressor": TopK(0.01, value_bits=2)}),
}


@dataclass(eq=False)
class Bucket:
    """Stands in for DDP's ``GradBucket``, which Python cannot make."""

    number: int
    is_last_one: bool
    of: Sequence[nn.Parameter]
    values: torch.Tensor
    parts: list[torch.Tensor] = field(default_factory=list)

    def index(self) -> int:
        """Return its place among the buckets of a backward pass."""
        return self.number

    def is_last(self) -> bool:
        """Return whether it is the last of the pass."""
        return self.is_last_one

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return whose gradients it holds."""
        return self.of

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, views of the buffer."""
        return self.parts

    def buffer(self) -> torch.Tensor:
        """Return all of them, flat."""
        return self.values


class Shell(DistributedDataParallel):
    """DDP without its engine, which needs a driver: the buckets, and a place for a hook.

    Args:
        module: On the counted device; its gradients become views of the buckets.
    """

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module
        group = dist.group.WORLD
        assert group is not None
        self.process_group = group
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._comm_hooks: list[Any] = []
        self.buckets = list(buckets_of(module))
        self.reducer = mock.Mock(_get_zeros_like_grad_buckets=lambda: self.buckets)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Note the hook, as DDP does."""
        self._comm_hooks.append((hook, state))

    def reduce(self, state: HookState, counted: CountedDevice) -> None:
        """Call the hook for all buckets of a backward pass, under the name of its part."""
        with counted.part("hook"), torch.no_grad():  # as in a backward pass
            for bucket in self.buckets:
                state.reduce(bucket).wait()  # type: ignore[arg-type]


def buckets_of(module: nn.Module) -> Iterator[Bucket]:
    """Divide a model's gradients as DDP does, in the order in which a backward pass makes them."""
    parameters = list(module.parameters())[::-1]
    shapes = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]
    divided, _ = dist._compute_bucket_assignment_by_size(
        shapes, list(BUCKET_BYTES), [False] * len(shapes)
    )
    for number, places in enumerate(divided):
        members = [parameters[place] for place in places]
        values = torch.empty(sum(p.numel() for p in members), device=DEVICE)
        sizes = [p.numel() for p in members]
        flat = values.split(sizes)
        gradients = [part.view(p.shape) for part, p in zip(flat, members, strict=True)]
        for parameter, gradient in zip(members, gradients, strict=True):
            parameter.grad = gradient
        yield Bucket(number, number == len(divided) - 1, members, values, gradients)


def on_device(config: GPTConfig) -> GPT:
    """Build a model whose tensors lie on the counted device."""
    with torch.device("meta"):
        model = GPT(config)
    moved: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, device=DEVICE))
            part.register_parameter(name, moved[id(parameter)])
    return model


class Scaler(torch.amp.GradScaler):
    """A gradient scaler whose scale is on the device; torch's turns itself off without a driver."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._lazy_init_scale_growth_tracker(DEVICE)

    def get_scale(self) -> float:
        """Return the usual scale, for which the host waits."""
        super().get_scale()
        return 65536.0


@contextmanager
def parts_named(counted: CountedDevice) -> Iterator[None]:
    """Tally under its name what lowdiff's optimizer hooks and its snapshots do."""
    named = {
        (Session, "before_optimizer"): "pre-hook",
        (Session, "after_optimizer"): "post-hook",
        (Staging, "snapshot"): "snapshot",
    }
    with ExitStack() as patched:
        for (owner, method), name in named.items():
            real = getattr(owner, method)

            def within(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
                with counted.part(_name):
                    return _real(*args, **options)

            patched.enter_context(mock.patch.object(owner, method, within))
        yield


def trainee(arm: Arm, config: GPTConfig) -> tuple[Shell, torch.optim.Optimizer]:
    """Make a model on the counted device and its optimizer."""
    model = on_device(config)
    rate: float | torch.Tensor = 1e-4
    if arm.lies_there:
        norm = nn.BatchNorm1d(config.width, affine=False, device=DEVICE)
        model.register_module("norm", norm)
        rate = torch.full((), 1e-4, device=DEVICE)
    ddp = Shell(model)
    optimizer = torch.optim.AdamW(
        ddp.parameters(), rate, fused=arm.fused, foreach=not arm.fused, capturable=arm.lies_there
    )
    return ddp, optimizer


def counts(
    arm: Arm, config: GPTConfig, steps: int, folder: Path, kernel_bytes: Mapping[str, float]
) -> list[dict[str, Tally]]:
    """Train; each counted step's parts."""
    counted = CountedDevice(kernel_bytes)
    found = []
    with counted, parts_named(counted), ExitStack() as closing:
        ddp, optimizer = trainee(arm, config)
        checkpointer = lowdiff.Checkpointer(
            folder / "run",
            staging=folder / "staging",
            snapshot_every=WARM_UP + steps // 2,
            retention=None,
            on_error="raise",
            **arm.options,
        )
        scaler = Scaler() if arm.scales else None
        stateful: dict[str, Any] = {} if scaler is None else {"scaler": scaler}
        checkpointer.attach(ddp, optimizer, **stateful)
        closing.callback(checkpointer.close)
        for number in range(WARM_UP + steps):
            counted.reset()
            train_step(counted, checkpointer, ddp, optimizer, arm, scaler)
            if number >= WARM_UP:
                found.append(counted.parts)
        counted.reset()  # closing belongs to no step
    return found


def train_step(
    counted: CountedDevice,
    checkpointer: lowdiff.Checkpointer,
    ddp: Shell,
    optimizer: torch.optim.Optimizer,
    arm: Arm,
    scaler: Scaler | None,
) -> None:
    """Make one step behind a forward and a backward pass that nobody computes."""
    for _ in range(arm.passes):
        ddp.reduce(checkpointer.hook_state, counted)
    with counted.part("user"):
        if scaler is not None and not arm.fused:
            scaler.unscale_(optimizer)
        if arm.clips:
            checkpointer.clip_grad_norm_(ddp.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    with counted.part("commit"):
        checkpointer.commit()


def hook_of_eight(config: GPTConfig, value_bits: int | None = None) -> Tally:
    """Count top-k's hook in one of eight ranks, whose collectives are torch's fakes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    counted = CountedDevice()
    try:
        with counted:
            ddp = Shell(on_device(config))
            hooked = Hooked(ddp, TopK(0.01, value_bits=value_bits))
            for _ in range(2):
                counted.reset()
                ddp.reduce(hooked.state, counted)
                hooked.end_step()
    finally:
        dist.destroy_process_group()
    return counted.parts["hook"]


def total(tallies: Iterable[Tally]) -> Tally:
    """Add tallies up."""
    found = Tally()
    for tally in tallies:
        found.launches += tally.launches
        found.num_bytes += tally.num_bytes
        found.link_bytes += tally.link_bytes
        found.waits += tally.waits
        found.operators += tally.operators
    return found


def seconds(tally: Tally) -> float:
    """Predict how long it takes."""
    on_device = tally.num_bytes / MEMORY_BYTES_PER_SECOND
    link = tally.link_bytes / LINK_BYTES_PER_SECOND
    return max(tally.launches * LAUNCH_SECONDS, on_device) + link


def figures_of(prefix: str, steps: Sequence[Mapping[str, Tally]], elements: int) -> dict[str, Any]:
    """Named figures of one arm; a steady step is the median one by launches."""

    def own(step: Mapping[str, Tally]) -> Tally:
        return total(step[name] for name in PARTS if name in step)

    without = (step for step in steps if not any(name in step for name in _OF_SNAPSHOT))
    plain = sorted(without, key=lambda step: own(step).launches)
    steady = plain[(len(plain) - 1) // 2]
    hook, step, every = steady.get("hook", Tally()), own(steady), total(map(own, steps))
    figures: dict[str, Any] = {
        "hook_launches": hook.launches,
        "step_launches": step.launches,
        "hook_bytes_per_element": hook.num_bytes / elements,
        "step_bytes_per_element": step.num_bytes / elements,
        "hook_host_waits": hook.waits.total(),
        "host_waits": step.waits.total(),
        "predicted_hook_ms": 1e3 * seconds(hook),
        "predicted_step_ms": 1e3 * seconds(step),
        "mean_launches": every.launches / len(steps),
        "mean_host_waits": every.waits.total() / len(steps),
        "mean_link_bytes": every.link_bytes / len(steps),
    }
    for name in PARTS[1:]:
        among = steps if name in _OF_SNAPSHOT else [steady]
        if shares := [one[name] for one in among if name in one]:
            key, part = name.replace("-", "_"), total(shares)
            figures[f"{key}_launches"] = part.launches / len(shares)
            figures[f"{key}_host_waits"] = part.waits.total() / len(shares)
    return {f"{prefix}{name}": value for name, value in figures.items()}


def sample_of(steps: Sequence[Mapping[str, Tally]]) -> dict[str, Any]:
    """Describe what a step did in each part on average: counts, operators, and where the host waits."""
    found: dict[str, Any] = {}
    for name in sorted({name for step in steps for name in step}):
        tallies = [step[name] for step in steps if name in step]
        count, part = len(tallies), total(tallies)
        found[name or "elsewhere"] = {
            "steps": count,
            "launches": part.launches / count,
            "bytes": part.num_bytes / count,
            "link_bytes": part.link_bytes / count,
            "waits": {k: v / count for k, v in part.waits.most_common()},
            "operators": {k: v / count for k, v in part.operators.most_common()},
        }
    return found


def draw(axes: Axes, result: Result) -> None:
    """Launches of a steady step, by arm."""
    bars = {key: v for key, v in result.summary.items() if key.endswith("step_launches")}
    axes.barh(
        [key.removesuffix("_step_launches") or "topk" for key in bars],
        list(bars.values()),
        color=BLUE,
    )
    axes.set_xlabel("launches of lowdiff's in a step")


def main(argv: Sequence[str] | None = None) -> None:
    """Count every arm."""
    parser = arguments(__doc__)
    args = parser.parse_args(argv)
    name, count = ("tiny", SMOKE_STEPS) if args.smoke else ("gpt2-small", STEPS)
    facts, (config, _) = machine(), MODELS[name]
    with torch.device("meta"):
        elements = sum(p.numel() for p in GPT(config).parameters())
    kernel_bytes = measured()
    samples: dict[str, Any] = {"kernels": kernel_bytes}
    summary: dict[str, Any] = {
        "elements": elements,
        "kernel_bytes_per_element": sum(kernel_bytes.values()),
    }
    for prefix, arm in ARMS.items():
        if args.smoke and prefix not in SMOKE_ARMS:
            continue
        with tempfile.TemporaryDirectory(prefix="lowdiff-ops-") as made:
            store = dist.FileStore(f"{made}/store", 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                steps = counts(arm, config, count, Path(made), kernel_bytes)
            finally:
                dist.destroy_process_group()
        samples[prefix.rstrip("_") or "topk"] = sample_of(steps)
        summary |= figures_of(prefix, steps, elements)
    hook = hook_of_eight(config)
    samples["topk of eight ranks"] = sample_of([{"hook": hook}])
    summary["eight_hook_launches"] = hook.launches
    summary["eight_hook_host_waits"] = hook.waits.total()
    settings = {
        "model": name,
        "steps": count,
        "launch_seconds": LAUNCH_SECONDS,
        "memory_bytes_per_second": MEMORY_BYTES_PER_SECOND,
        "link_bytes_per_second": LINK_BYTES_PER_SECOND,
    }
    write(Result("device_ops", settings, args.seed, facts, samples, summary), args.out, draw)


if __name__ == "__main__":
    ending.run(lambda: main(sys.argv[1:]))
