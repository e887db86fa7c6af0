"""The example for torchtitan behind its seam as recorded: killed anywhere, it goes on exactly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowdiff.errors import ConfigError
from tests.integrations.scripts import Scripts, differences
from tests.integrations.torchtitan.recorded import install

pytestmark = [pytest.mark.framework, pytest.mark.launch, pytest.mark.timeout(300)]

#: Whose scripts the fixtures run.
TRAINING = "tests.integrations.torchtitan.training"


@pytest.mark.parametrize("place", ["backward:1", "backward:5", "stepped:5", "saved:5", "saved:12"])
def test_it_goes_on_after_a_kill_at(
    scripts: Scripts, whole: Any, tmp_path: Path, place: str
) -> None:
    assert scripts.run("one", tmp_path / "run", place) == [-9]
    found, expected = scripts.finish("one", tmp_path / "run"), whole("one")
    if (
        place == "saved:12"
    ):  # all was made before, so no step begins, with which generators come back
        expected = [dict(expected[0])]
        for result in (found, expected):
            del result[0]["last loss"], result[0]["drawn"]
    assert not differences("", found, expected)


@pytest.mark.parametrize("place", ["backward:4", "stepped:7", "saved:9"])
def test_shards_go_on_after_one_rank_dies(
    scripts: Scripts, whole: Any, tmp_path: Path, place: str
) -> None:
    assert -9 in scripts.run("fsdp", tmp_path / "run", place, ranks=2)
    found = scripts.finish("fsdp", tmp_path / "run", ranks=2)
    assert not differences("", found, whole("fsdp", 2))


def test_a_finished_run_goes_on_with_more_steps(
    scripts: Scripts, whole: Any, tmp_path: Path
) -> None:
    scripts.finish("one", tmp_path / "run", steps=7)
    assert not differences("", scripts.finish("one", tmp_path / "run"), whole("one"))


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("torchtitan"):
            monkeypatch.delitem(sys.modules, name)
    install()
    from lowdiff.examples.torchtitan_manager import LowDiffManager

    model = nn.Linear(2, 2)
    given: dict[str, Any] = {
        "dataloader": None,
        "optimizers": [torch.optim.SGD(model.parameters())],
        "lr_schedulers": None,
        "states": {},
        "base_folder": str(tmp_path),
    }
    config = LowDiffManager.Config(enable=True)
    with pytest.raises(ConfigError, match="2 model parts: a pipeline's stages"):
        LowDiffManager(config, model_parts=[model, model], **given)
    config = LowDiffManager.Config(enable=True, initial_load_path="/seed")
    with pytest.raises(ConfigError, match="initial_load_path is not read here"):
        LowDiffManager(config, model_parts=[model], **given)
    disabled = LowDiffManager(LowDiffManager.Config(), model_parts=[model], **given)
    assert not disabled.load()
    assert not disabled.save(1)
    disabled.close()
