"""What any worker does before it trains: pick its device, join the others, seed."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist


def start_process_group() -> torch.device:
    """NCCL where every worker of this machine has its own GPU, Gloo on the CPU elsewhere.

    Reads torchrun's environment variables, and makes the device's arithmetic reproducible: one
    thread on the CPU, deterministic kernels on the GPU.
    """
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what the next line asks for
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def seed_everything(seed: int) -> None:
    """Seed the three global generators that training code may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
