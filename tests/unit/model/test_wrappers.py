"""What frameworks wrap around models and optimizers is looked through."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UsageError
from lowdiff.model.binding import bare_optimizers, describe


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


def checkpointed(folder: Path, ddp: DistributedDataParallel) -> lowdiff.Checkpointer:
    """A checkpointer with the model attached."""
    made = lowdiff.Checkpointer(
        folder / "run", compressor=TopK(0.5, dense_below=1), staging=folder / "staging"
    )
    made.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    return made


def pickled(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """What ``torch.save`` and ``torch.load`` make of it."""
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    loaded: DistributedDataParallel = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.cases(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, lambda ddp: AveragedModel(ddp).module])
def test_a_model_is_copied_while_it_is_attached(
    ddp: DistributedDataParallel,
    tmp_path: Path,
    copied: Callable[[DistributedDataParallel], DistributedDataParallel],
) -> None:
    def num_kept(model: DistributedDataParallel) -> int:
        model.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        return sum(int(p.grad.count_nonzero()) for p in model.parameters() if p.grad is not None)

    checkpointer = checkpointed(tmp_path, ddp)
    twin = copied(ddp)
    hook, state = twin._comm_hooks[0]
    with pytest.raises(UsageError, match="outside the life of its Checkpointer"):
        hook(state, None)
    assert num_kept(twin) == 10  # averaged by DDP itself: PyTorch gives a copy's reducer no hook
    assert num_kept(ddp) == 5
    checkpointer.close()
    again = checkpointed(tmp_path / "twin", twin)
    assert num_kept(twin) == 5
    again.close()
    with pytest.raises(UsageError, match="outside the life of its Checkpointer"):
        num_kept(twin)


def test_an_older_checkpointer_of_the_model_closes_and_the_newer_one_goes_on(
    ddp: DistributedDataParallel, tmp_path: Path
) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    old, new = (
        lowdiff.Checkpointer(tmp_path / name, compressor=TopK(0.5), staging=tmp_path / "staging")
        for name in "ab"
    )

    def train(checkpointer: lowdiff.Checkpointer) -> None:
        ddp.zero_grad()
        ddp(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        checkpointer.commit()

    old.attach(ddp, optimizer)
    train(old)
    new.attach(ddp, optimizer)
    old.close()
    train(new)
    new.close()
    assert [lowdiff.recover(tmp_path / name).step for name in "ab"] == [1, 1]
    with pytest.raises(UsageError, match="outside the life of its Checkpointer"):
        ddp(torch.randn(3, 4)).sum().backward()
