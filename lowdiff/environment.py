"""Facts on which the last bits of the arithmetic can depend."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from lowdiff.types import Environment


def environment_of(device: torch.device) -> Environment:
    """Describe this process on this machine."""
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch_version=torch.__version__,
        processor=_processor(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_threads=torch.get_num_threads(),
        flush_denormal=_flushes_denormals(),
        mkl=_mkl_version(),
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


def _flushes_denormals() -> bool:
    smallest_normal = torch.tensor(torch.finfo(torch.float32).tiny, device="cpu")
    return bool(smallest_normal * 0.5 == 0)


def _mkl_version() -> str:
    lines = torch.__config__.show().splitlines()
    return next((line.strip(" -") for line in lines if "Math Kernel Library" in line), "none")
