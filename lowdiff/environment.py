"""Facts on which the last bits of the arithmetic can depend."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from lowdiff.arithmetic import flushes_denormals, process_modes
from lowdiff.types import Environment


def environment_of(device: torch.device) -> Environment:
    """Describe this process on this machine."""
    default_dtype, matmul_precision = process_modes()
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch_version=torch.__version__,
        processor=_processor(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        flush_denormal=flushes_denormals(),
        mkl=_mkl_version(),
        default_dtype=default_dtype,
        matmul_precision=matmul_precision,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _mkl_version() -> str:
    lines = torch.__config__.show().splitlines()
    return next((line.strip(" -") for line in lines if "Math Kernel Library" in line), "none")
