"""Settings of process and machine that the last bits of the arithmetic can depend on."""

from __future__ import annotations

import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.types import Environment


def process_modes() -> tuple[str, str]:
    """Return the default dtype, and the precision of float32 products; "" if torch cannot tell."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # `fp32_precision` set the precision for one backend only
        precision = ""
    return str(torch.get_default_dtype()).removeprefix("torch."), precision


def other_torch(environment: Environment) -> str | None:
    """Return the version of PyTorch that a run was made with; None if it is the version of this process."""
    return None if environment.torch_version == torch.__version__ else environment.torch_version


def flushes_denormals() -> bool:
    """Return whether this thread flushes denormal numbers to zero."""
    return sys.float_info.min * 0.5 == 0.0


@contextmanager
def arithmetic_of(environment: Environment) -> Iterator[None]:
    """Compute with a run's numeric modes in this thread; an unknown precision stays as it is.

    Flushing of denormals is a setting of the thread. The other modes belong to the whole process:
    threads that want the same modes share them, and a thread that wants others waits.
    """
    before = flushes_denormals()
    with _shared_modes.lent((environment.default_dtype, environment.matmul_precision)):
        torch.set_flush_denormal(environment.flush_denormal)
        try:
            yield
        finally:
            torch.set_flush_denormal(before)


class _SharedModes:
    """The process's numeric modes, changed for some threads at a time."""

    def __init__(self) -> None:
        self._given_back = threading.Condition()
        self._users = 0
        self._lent = self._own = ("", "")

    @contextmanager
    def lent(self, wanted: tuple[str, str]) -> Iterator[None]:
        """Set these modes, or wait until the threads with other modes are done."""
        with self._given_back:
            self._given_back.wait_for(lambda: not self._users or self._lent == wanted)
            if not self._users:
                self._own, self._lent = process_modes(), wanted
                _set_process_modes(wanted)
            self._users += 1
        try:
            yield
        finally:
            with self._given_back:
                self._users -= 1
                if not self._users:
                    _set_process_modes(self._own)
                    self._given_back.notify_all()


def _set_process_modes(wanted: tuple[str, str]) -> None:
    """Set the modes that differ, except a precision that torch could not tell and not restore."""
    dtype, precision = wanted
    dtype_now, precision_now = process_modes()
    if dtype != dtype_now:
        torch.set_default_dtype(torch_dtype(dtype))
    if precision and precision_now and precision != precision_now:
        torch.set_float32_matmul_precision(precision)


_shared_modes = _SharedModes()


def environment_of(device: torch.device) -> Environment:
    """Describe this process on this machine."""
    default_dtype, matmul_precision = process_modes()
    return Environment(
        device=devices.name_of(device),
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
