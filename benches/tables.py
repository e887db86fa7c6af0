"""Tables for the documents, one per bench, from what its JSON says and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is left as it is."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """A share, in per cent with one place."""
    return f"{100 * share:.1f} %"


def excess(ratio: float) -> str:
    """How much more than one a ratio is, in per cent with its sign."""
    return f"{100 * (ratio - 1):+.1f} %"


def milliseconds(seconds: float) -> str:
    """Seconds, with three digits that count."""
    return f"{1000 * seconds:.0f} ms" if abs(seconds) >= 1 else f"{1000 * seconds:.3g} ms"


def verdict(value: float, target: float, text: str, *, at_least: bool = False) -> str:
    """A target, and whether the value is within it."""
    is_met = value >= target if at_least else value <= target
    return f"{text}: {'met' if is_met else '**missed**'}"


def of_overhead(found: Summary) -> str:
    """Table of ``bench_overhead``."""
    live, recovery = "", "watch_recovery_"
    bounds = found["overhead_upper95"], found["overhead_watch_recovery_upper95"]
    medians = found["overhead_median"], found["overhead_watch_recovery_median"]

    def row(text: str, key: str, shown: Callable[[float], str]) -> list[str]:
        return [text, *(shown(found[arm + key]) for arm in (live, recovery))]

    # Results of before they were measured lack these.
    in_copies = [
        row(text, key, shown)
        for text, key, shown in (
            (
                "the same, over a plain copy of its bytes",
                "snapshot_over_memcpy",
                lambda ratio: verdict(ratio, 2.5, f"{ratio:.2f}, target 2.5"),
            ),
            (
                "the first one, in `attach`, likewise",
                "snapshot_first_over_memcpy",
                "{:.2f}".format,
            ),
        )
        if live + key in found
    ]
    return table(
        ["", '`watch="live"`, the default', '`watch="recovery"`'],
        [
            ["overhead, median of the pairs less A/A", *map(percent, medians)],
            ["its 95 % upper bound", *map(percent, bounds)],
            [
                "target of the bound",
                verdict(bounds[0], 0.05, "5 %"),
                verdict(bounds[1], 0.03, "3 %"),
            ],
            row("a step", "step_seconds", lambda seconds: f"{seconds:.3f} s"),
            row("training thread per step", "training_thread_ms_per_step", "{:.1f} ms".format),
            row(
                "the compression itself, in both arms",
                "compression_ms_per_step",
                "{:.0f} ms".format,
            ),
            row(
                f"durable bytes per step, where a full snapshot has {found['snapshot_bytes'] / 1e6:.0f} MB",
                "durable_bytes_per_step",
                lambda size: f"{size / 1e3:.0f} kB",
            ),
            row(
                "a full snapshot costs the training thread",
                "snapshot_training_thread_seconds",
                milliseconds,
            ),
            *in_copies,
        ],
    )


def of_lowdiff_plus(found: Summary) -> str:
    """Table of ``bench_lowdiff_plus``."""
    bound, restart = found["overhead_upper95"], found["restart_over_copy"]
    return table(
        ["", "", "target"],
        [
            ["overhead, median of the pairs less A/A", percent(found["overhead_median"]), ""],
            ["its 95 % upper bound", percent(bound), verdict(bound, 0.05, "5 %")],
            ["a step", f"{found['step_seconds']:.2f} s", ""],
            [
                f"training thread per step, for {found['model_bytes'] / 1e6:.0f} MB of gradients",
                f"{found['training_thread_ms_per_step']:.0f} ms",
                "",
            ],
            *(
                [text, f"{100 * found[key]:+.0f} %", ""]
                for text, key in (
                    (
                        "steps that end with `torch.save`, over those that do not",
                        "overhead_of_torch_save",
                    ),
                    ("steps that start `async_save`, likewise", "overhead_of_async_save"),
                )
            ),
            [
                "state back in memory after a kill, over a plain copy of it",
                f"{restart:.2f}",
                verdict(restart, 1.5, "1.5"),
            ],
            [
                "most staging memory, in copies of the state",
                f"{found['largest_staging_over_state']:.2f}",
                "",
            ],
            *_of_gradients(found),
        ],
    )


def _of_gradients(found: Summary) -> list[list[str]]:
    """Rows of strategy gradients beside the replica; none in results of before there was one."""
    if "gradients_upper95" not in found:
        return []
    rows = [
        ["gradients kept: median of the pairs less A/A", percent(found["gradients_median"]), ""],
        [
            "its 95 % upper bound",
            percent(found["gradients_upper95"]),
            verdict(found["gradients_upper95"], 0.04, "4 %"),
        ],
        [
            "likewise, while memory is new, over a step without",
            percent(found["gradients_in_new_memory"]),
            "",
        ],
    ]
    for arm, name, target in (
        ("gradients", "gradients kept", 0.06),
        ("replica", "replica", None),
    ):
        bound = found[f"{arm}_two_ranks_upper95"]
        median = percent(found[f"{arm}_two_ranks_median"])
        rows.append(
            [
                f"two ranks that share two cores, {name}: median, 95 % upper bound",
                f"{median}, {percent(bound)}",
                "" if target is None else verdict(bound, target, percent(target)),
            ]
        )
    ratio = found["gradients_recovery_over_steps"]
    rows.append(
        [
            "recovery from kept gradients, over reading the image and the optimizer's steps alone",
            f"{ratio:.2f}",
            verdict(ratio, 1.3, "1.3"),
        ]
    )
    ratio = found["gradients_bytes_over_plan"]
    rows.append(["memory over what `attach` planned", f"{ratio:.2f}", verdict(ratio, 1.05, "1.05")])
    return rows


def of_replay(found: Summary) -> str:
    """Table of ``bench_replay``."""
    two = found["speedup_two_workers_vs_published"]
    return table(
        ["blocks with one worker, against", "ratio", "target"],
        [
            ["the naive loop", f"{found['speedup_vs_naive']:.2f}", ""],
            [
                "the loop with memory kept",
                f"{found['speedup_vs_kept_memory']:.2f}",
                verdict(found["speedup_vs_kept_memory"], 1.2, "1.2", at_least=True),
            ],
            [
                "the published procedure",
                f"{found['speedup_vs_published']:.2f} (two workers: {two:.2f})",
                verdict(found["speedup_vs_published"], 5, "5", at_least=True),
            ],
            [
                "two workers against one",
                f"{found['two_workers_vs_one']:.2f}",
                verdict(found["two_workers_vs_one"], 1.8, "1.8", at_least=True),
            ],
            ["two independent processes against one", f"{found['two_core_scaling']:.2f}", ""],
            ["one worker, per element and step", f"{found['blocks_ns_per_element']:.2f} ns", ""],
            [
                "two workers, likewise",
                f"{found['blocks_two_workers_ns_per_element']:.2f} ns",
                "",
            ],
            ["of which decoding", f"{found['decode_ns_per_element']:.2f} ns", ""],
        ],
    )


def of_restart(found: Summary) -> str:
    """Table of ``bench_restart``."""
    counts = sorted(int(key.split("_")[1]) for key in found if key.startswith("recover_"))
    parts = []
    for count in counts:
        ratio = found[f"ratio_to_parts_{count}"]
        is_met = ": met" if ratio <= 1.2 else ": **missed**"
        parts.append(f"{ratio:.2f}{is_met if count == 20 else ''}")
    return table(
        ["differentials after the snapshot", *map(str, counts)],
        [
            ["recovery", *(f"{found[f'recover_{n}_seconds']:.2f} s" for n in counts)],
            ["over loading and the steps alone (target 1.2 at 20)", *parts],
            [
                "over `torch.distributed.checkpoint.load` of a checkpoint of that very step",
                *(f"{found[f'ratio_to_dcp_load_{n}']:.1f}" for n in counts),
            ],
        ],
    )


def of_codec(found: Summary) -> str:
    """Table of ``bench_codec``."""

    def entries(name: str) -> str:
        rate, low, high = (
            found[f"{name}_entries_per_second{end}"] / 1e6 for end in ("", "_slowest", "_fastest")
        )
        return f"{rate:.0f} ({low:.0f} to {high:.0f})"

    def heavy(name: str) -> float:
        return float(found[f"heavy_tailed_{name}"])

    encode, shuffled = "encode_entries_per_second", "sort_and_encode_entries_per_second"
    worst32 = max(found["bytes_per_entry_float32"], heavy("bytes_per_entry_float32"))
    worst16 = max(found["bytes_per_entry_bfloat16"], heavy("bytes_per_entry_bfloat16"))
    slowest = min(found["decode_bytes_per_second"], heavy("decode_bytes_per_second")) / 1e6
    return table(
        ["float32 values", "gradients", "heavy-tailed", "target"],
        [
            [
                "bytes an entry",
                f"{found['bytes_per_entry_float32']:.2f}",
                f"{heavy('bytes_per_entry_float32'):.2f}",
                verdict(worst32, 4.4, "4.4"),
            ],
            [
                "bytes an entry, bfloat16 values",
                f"{found['bytes_per_entry_bfloat16']:.2f}",
                f"{heavy('bytes_per_entry_bfloat16'):.2f}",
                verdict(worst16, 2.4, "2.4"),
            ],
            [
                "encode, million entries/s",
                entries("encode"),
                f"{heavy(encode) / 1e6:.0f}",
                verdict(min(found[encode], heavy(encode)) / 1e6, 7, "7", at_least=True),
            ],
            [
                "shuffled: sort and encode, million entries/s",
                entries("sort_and_encode"),
                "",
                verdict(found[shuffled] / 1e6, 7, "7", at_least=True),
            ],
            [
                "decode, MB/s",
                f"{found['decode_bytes_per_second'] / 1e6:.0f}",
                f"{heavy('decode_bytes_per_second') / 1e6:.0f}",
                verdict(slowest, 300, "300", at_least=True),
            ],
        ],
    )


#: What stands in figures for a compressor, and what users write.
_WRITTEN = {
    "topk_1": "`TopK(0.01)`",
    "topk_1_2_bits": "`TopK(0.01, value_bits=2)`",
    "topk_3_2_bits": "`TopK(0.03, value_bits=2)`",
    "topk_10_2_bits": "`TopK(0.1, value_bits=2)`",
    "cyclic_topk_3_2_bits": "`CyclicTopK(0.03, value_bits=2)`",
    "randomk_3": "`RandomK(0.03)`",
    "powersgd_2": "`PowerSGD(2)`",
    "powersgd_4": "`PowerSGD(4)`",
    "powersgd_8": "`PowerSGD(8)`",
    "8_bits": "`Quantize(8)`",
    "4_bits": "`Quantize(4)`",
    "cast_bfloat16": "`Cast(torch.bfloat16)`",
    "cast_float16": "`Cast(torch.float16)`",
    "torch_allreduce": "DDP's all-reduce",
    "torch_powerSGD_4": "PyTorch's `powerSGD_hook`, rank 4",
    "torch_bf16": "PyTorch's `bf16_compress_hook`",
    "torch_fp16": "PyTorch's `fp16_compress_hook`",
}


def of_compress(found: Summary) -> str:
    """Tables of ``bench_compress``: the selection, and what every compressor costs."""
    speedup, least = found["topk_speedup_vs_torch"], found["topk_speedup_least"]
    selection = table(
        ["top-k 1 % against `torch.topk` per parameter", "", "target"],
        [
            [
                "times as fast",
                f"{speedup:.1f} (least of the rounds {least:.1f})",
                verdict(speedup, 5, "5", at_least=True),
            ]
        ],
    )
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("hook, ms", "hook_seconds_per_million", lambda v: f"{1e3 * v:.1f}"),
        ("step, ms", "consume_seconds_per_million", lambda v: f"{1e3 * v:.1f}"),
        ("recovery, ms", "decode_seconds_per_million", lambda v: f"{1e3 * v:.1f}"),
        ("sent, B", "wire_bytes_per_element", lambda v: f"{v:.3f}"),
        ("stored, B", "stored_bytes_per_element", lambda v: f"{v:.3f}"),
        ("scratch, buckets", "scratch_buckets", lambda v: f"{v:.1f}"),
    ]
    costs = table(
        ["", *(head for head, _, _ in columns)],
        (
            [text, *(f(found[f"{k}/{c}"]) if f"{k}/{c}" in found else "" for _, c, f in columns)]
            for k, text in _WRITTEN.items()
            if f"{k}/hook_seconds_per_million" in found
        ),
    )
    return f"{selection}\n\n{costs}"


def of_convergence(found: Summary) -> str:
    """Table of ``bench_convergence``: losses, and deviations of dense training's seeds above it."""
    tasks = ("text", "digits")

    def cells(task: str, name: str) -> list[str]:
        best = f"{task}/{name}"
        warmup = f", warm-up {found[f'{best}_warmup']}" if found[f"{best}_warmup"] else ""
        of_dense = found[f"{best}_rate"] / found[f"{task}/dense_rate"]
        return [
            f"{found[f'{best}_loss']:.4f} ({found[f'{best}_deviations']:+.1f})",
            f"{of_dense:g}{warmup}",
        ]

    rows = []
    for name, text in {"dense": "dense", **_WRITTEN}.items():
        if f"text/{name}_loss" in found:
            of_tasks = [cell for task in tasks for cell in cells(task, name)]
            rows.append([text, f"{found[f'text/{name}_stored']:.3f}", *of_tasks])
    heads = ["", "stored, B", "text, small GPT, AdamW", "rate", "digits, small CNN, SGD", "rate"]
    worst = found["worst_deviation_at_tuned_rate"]
    verdicts = ", ".join(found["targets_missed"]) or "none"
    return (
        table(heads, rows)
        + f"\n\nOf those that are recommended the worst is {worst:+.1f} deviations above dense training (target 2.0), "
        f"missed by: {verdicts}."
    )


def of_lost_tail(found: Summary) -> str:
    """Table of ``bench_lost_tail``: mean steps until the loss is regained, over the lost ones."""
    ways = (
        "stale",
        "damped_linear",
        "auto-regressive",
        "denoised_auto-regressive",
        "temporal_network",
    )
    rows = []
    for task in ("text", "digits"):
        for interval in (25, 100, 400):
            key = f"{task}/{interval}"
            if f"{key}/gate_takes" not in found:
                continue
            costs = [found.get(f"{key}/{way}_over_lost") for way in ("redo", "gate", *ways)]
            cells = ["" if cost is None else f"{cost:.2f}" for cost in costs]
            rows.append(
                [f"{task}, {interval} steps", *cells, f"{100 * found[f'{key}/gate_takes']:.0f} %"]
            )
    heads = ["lost", "redo", "gate", *(way.replace("_", " ") for way in ways), "the gate takes one"]
    return table(heads, rows)


def of_gpu(found: Summary) -> str:
    """Table of ``benches.gpu``: what GPT-2 small's step takes more, as far as its parts have run."""
    rows = {
        "hook_over_none": "compressing with top-k 1 %, nothing kept",
        "log_over_none": "log, top-k 1 %",
        "log_over_hook": "log, beside the same hook",
        "survivors_over_none": "`survivors`",
        "powersgd_over_none": "log, `PowerSGD(4)`",
        "gradients_over_none": "no compressor",
        "snapshot_over_none": "a full snapshot every 50 steps",
    }
    shown = [[text, percent(found[key])] for key, text in rows.items() if key in found]
    return table(["GPT-2 small", "over training without"], shown)


def of_gpu_first(found: Summary) -> str:
    """Table of the first bench on a GPU: seconds per step of GPT-2 small."""
    arms = {
        "none": "no checkpoints",
        "hook": "top-k 1 % in the hook, nothing kept",
        "lowdiff_topk": "lowdiff, top-k 1 %",
        "lowdiff_plus": "lowdiff without a compressor (replica)",
        "dcp_async": "DCP `async_save`",
    }
    rows = []
    for arm, text in arms.items():
        name = f"gpt2-small/{arm}"
        drained = found.get(f"{name}_drained_seconds")
        rows.append([
            text,
            f"{1e3 * found[f'{name}_seconds']:.0f}",
            f"{1e3 * found[f'{name}_mean_seconds']:.0f}",
            "" if drained is None else f"{1e3 * drained:.0f}",
            f"{found[f'{name}_host_waits_per_step']:.0f}",
        ])  # fmt: skip
    return table(
        [
            "GPT-2-small",
            "a step, ms",
            "with full snapshots",
            "with what is left to be done",
            "host waits",
        ],
        rows,
    )


def of_device_ops(found: Summary) -> str:
    """Table of ``bench_device_ops``: what one step of each arm does."""
    arms = {
        "": "`TopK(0.01)`, log",
        "clipped_": "the same, clipped",
        "scaled_": "with a gradient scaler",
        "fused_": "fused AdamW",
        "fused_scaled_": "fused AdamW with a gradient scaler",
        "rounded_": "bfloat16 values, clipped",
        "accumulated_": "two backward passes",
        "buffers_": "batch norm and the rate on the device",
        "binned_": "`TopK(0.01, value_bits=2)`, log",
        "powersgd_": "`PowerSGD(4)`, log",
        "powersgd_clipped_": "the same, clipped",
        "gradients_": "no compressor (replica)",
        "survivors_": "`survivors`",
    }
    rows = [
        [
            text,
            f"{found[f'{arm}hook_launches']:,}",
            f"{found[f'{arm}step_launches']:,}",
            f"{found[f'{arm}step_bytes_per_element']:.1f}",
            f"{found[f'{arm}hook_host_waits']:.0f}",
            f"{found[f'{arm}host_waits']:.0f}",
            f"{found[f'{arm}mean_host_waits']:.1f}",
            f"{found[f'{arm}snapshot_launches']:.0f}",
            f"{found[f'{arm}predicted_hook_ms']:.1f}",
            f"{found[f'{arm}predicted_step_ms']:.1f}",
        ]
        for arm, text in arms.items()
        if f"{arm}step_launches" in found  # an arm may be younger than the result
    ]
    heads = [
        *("GPT-2 small", "launches, hook", "launches, step", "bytes an element, step"),
        *("waits, hook", "waits, step", "waits, mean", "launches, snapshot"),
        *("predicted hook, ms", "predicted step, ms"),
    ]
    return table(heads, rows)


def of_tuner(found: Summary) -> str:
    """Table of ``bench_tuner``."""
    ratio = found["waste_over_best_fixed"]
    return table(
        ["", "steps between snapshots", "batch", "share of the time wasted"],
        [
            [
                "the tuner's choice",
                str(found["tuned_snapshot_every"]),
                str(found["tuned_batch_size"]),
                f"{100 * found['tuned_waste']:.2f} %",
            ],
            [
                "the best of the grid",
                str(found["best_snapshot_every"]),
                str(found["best_batch_size"]),
                f"{100 * found['best_fixed_waste']:.2f} %",
            ],
            ["ratio (target 1.05)", "", "", verdict(ratio, 1.05, f"{ratio:.4f}")],
        ],
    )


def of_survivors(found: Summary) -> str:
    """Table of ``bench_survivors``."""
    texts = {
        "torch_save": "torchrun, `torch.save`",
        "log": "torchrun, log of steps",
        "replica": "torchrun, replica",
        "survivors": "torchrun, survivors",
        "in_process": "in process with a hot spare, survivors",
    }
    rows = [
        [
            text,
            f"{found[f'restart_seconds_{arm}']:.1f} s",
            f"{found[f'lost_steps_{arm}']:.0f}",
            f"{found[f'caught_up_seconds_{arm}']:.1f} s",
        ]
        for arm, text in texts.items()
        if found[f"restart_seconds_{arm}"] is not None
    ]
    shown = table(["", "first step", "steps made again", "first new step"], rows)
    share = found["training_thread_share"]
    alone = found["training_thread_share_one_rank"]
    percents = f"{100 * share:.2f} % of a step of {found['step_seconds']:.2f} s"
    lines = [
        shown,
        (
            f"On average `torch.save` makes {found['redone_steps_torch_save']:.0f} steps again, here "
            f"{found['redone_seconds_torch_save']:.1f} s."
        ),
        (
            f"While nothing fails, survivors take {percents} (target {verdict(share, 0.005, '0.5 %')}), "
            f"with one rank {100 * alone:.2f} % (target {verdict(alone, 0.005, '0.5 %')})."
        ),
    ]
    in_process = found["restart_seconds_in_process"]
    if in_process is not None:
        lines[1] += f" In process, the target is {verdict(in_process, 1.5, '1.5 s')}."
    return "\n\n".join(lines)


def of_peer_memory(found: Summary) -> str:
    """Table of ``bench_peer_memory``."""
    rows = [
        [
            text,
            f"{found[own]:,.0f} bytes",
            f"{found[f'bytes_sent_per_step_{arm}']:+,.0f} bytes",
        ]
        for arm, text, own in (
            ("log", "log of steps", "messages_bytes_per_step_log"),
            ("replica", "replica", "messages_bytes_per_step_replica"),
            ("gemini", "whole state", "state_bytes_per_step_gemini"),
        )
    ]
    share, log = found["bytes_sent_per_step_over_gemini"], found["overhead_over_one_copy_upper95"]
    replica = found["overhead_replica_upper95"]
    lines = [
        table(["a second copy, per step of all nodes", "messages", "more at the interfaces"], rows),
        (
            f"The worse of log and replica sends {share:.4f} of what the whole state takes (target "
            f"{verdict(share, 0.01, '0.01')}). Interfaces carry the training's own traffic as well, which varies by "
            "more than the messages."
        ),
        (
            f"With a log a second copy takes {percent(found['overhead_over_one_copy_median'])} of a step, with "
            f"95 % confidence at most {percent(log)} (target {verdict(log, 0.02, '2 %')}); with a replica, whose "
            f"work doubles, {percent(found['overhead_replica'])}, at most {percent(replica)} "
            f"({verdict(replica, 0.02, '2 %')})."
        ),
        (
            f"What ranks lack after the loss of a node comes in {found['retrieval_over_copy']:.2f} of the time of "
            "plain copies of the same bytes to all of them "
            f"(target {verdict(found['retrieval_over_copy'], 1.5, '1.5')}), and of a copy of the fresh rank's "
            f"bytes alone in {found['retrieval_over_copy_of_one']:.1f}."
        ),
    ]
    return "\n\n".join(lines)


def of_sharded(found: Summary) -> str:
    """Table of ``bench_sharded``."""
    rows = [
        [
            text,
            f"{found[f'step_seconds{key}']:.2f} s",
            percent(found[f"overhead{key}_median"]),
            percent(found[f"overhead{key}_upper95"]),
        ]
        for key, text in (("", "FSDP2"), ("_ddp", "DDP"))
    ]
    bound = found["overhead_upper95"]
    return "\n\n".join(
        [
            table(["two ranks on two cores", "a bare step", "every step kept", "95 % bound"], rows),
            f"The target for FSDP2's bound is {verdict(bound, 0.06, '6 %')}.",
        ]
    )


def of_failures(found: Summary) -> str:
    """Table of ``bench_failures``."""
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("one step without a checkpointer", "step_seconds", lambda v: f"{v:.2f} s"),
        ("one step with all that checkpointing adds", "loop_seconds", lambda v: f"{v:.2f} s"),
        (
            "a recovery, from the kill until training goes on",
            "recovery_seconds",
            lambda v: f"{v:.2f} s",
        ),
        ("steps lost to a crash of processes", "lost_steps_process", lambda v: f"{v:.2f}"),
        ("steps lost with a node", "lost_steps_node", lambda v: f"{v:.2f}"),
        ("share of time recovering", "recovering_share", percent),
        ("share of time lost with steps", "lost_share", percent),
        ("effective training time", "effective_share", percent),
    ]
    error = found["largest_error"]
    shown = table(
        ["", "simulated", "real", "ratio"],
        [
            [
                text,
                form(found[f"{key}_simulated"]),
                form(found[f"{key}_real"]),
                f"{found[f'{key}_ratio']:.2f}",
            ]
            for text, key, form in rows
        ],
    )
    return (
        f"{shown}\n\n{found['kills']} kills; the largest error is {error:.2f} "
        f"(target {verdict(error, 0.2, '0.2')})."
    )


def of_publish(found: Summary) -> str:
    """Table of ``bench_publish``."""

    def row(label: str, end: str, target: str) -> list[str]:
        return [
            label,
            percent(found[f"changed_share{end}"]),
            f"{100 * found[f'bytes_over_full{end}']:.2f} %",
            f"{found[f'publish_over_save{end}']:.2f}",
            f"{found[f'apply_over_load{end}']:.2f}",
            target,
        ]

    made = table(
        ["a step", "values that changed", "bytes of a whole file", "time to publish, to save whole", "to follow, to load whole", "target"],
        [
            row("1 % moved by hand", "", verdict(100 * found["bytes_over_full"], 1.4, "1.4 %")),
            row("AdamW, learning rate 1e-6", "_rl", ""),
            row("AdamW, learning rate 3e-4", "_pretraining", ""),
        ],
    )  # fmt: skip
    share = found["training_thread_share"]
    return (
        f"{made}\n\nTraining thread: {100 * share:.3f} % of a step ({verdict(share, 0.002, '0.2 %')}). A step beside the publisher, "
        f"which works on the same cores: {excess(1 + found['overhead_median'])}, at most {excess(1 + found['overhead_upper95'])}; "
        f"{found['versions_per_step']:.2f} versions a step."
    )
