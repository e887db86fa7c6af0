"""What frameworks wrap around models and optimizers is looked through."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowdiff.attached import bare_optimizers, describe
from lowdiff.errors import ConfigError


def wrapped_by(package: str, optimizer: torch.optim.Optimizer) -> object:
    """Something like accelerate's AcceleratedOptimizer, of a package of that name."""
    names = {"optimizer": optimizer, "__module__": package}
    return types.new_class("Wrapped", exec_body=lambda body: body.update(names))()


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(4, 2))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "package", ["accelerate.optimizer", "lightning.pytorch.core.optimizer", "lightning.fabric"]
)
def test_the_optimizer_inside_a_framework_s_wrapper_is_taken(package: str) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    wrapped = wrapped_by(package, optimizer)
    assert bare_optimizers(wrapped) == (optimizer,)
    assert bare_optimizers([wrapped, optimizer]) == (optimizer, optimizer)


def test_other_wrappers_may_do_more_than_the_optimizer_inside() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"got a Wrapped; .*scheduler=scheduler"):
        bare_optimizers(wrapped_by("lookahead", optimizer))


def test_ddp_is_found_inside_a_compiled_model(ddp: DistributedDataParallel) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    compiled = nn.Module()  # like torch.compile(ddp), which takes seconds to import its compiler
    compiled._orig_mod = ddp
    attached = describe(compiled, [optimizer])
    assert attached.ddp is ddp
    assert attached.module is ddp.module
    assert describe(ddp.module, [optimizer]).ddp is None
