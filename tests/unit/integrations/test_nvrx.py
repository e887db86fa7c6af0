"""Restart in place, as far as no process fails."""

from __future__ import annotations

import importlib
import sys

import pytest

from lowdiff.errors import ConfigError

MODULE = "lowdiff.integrations.nvrx"


def test_without_the_package_it_says_what_to_install_and_for_which_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowdiff\[in-process\]'.*3.10 to 3.12"):
        importlib.import_module(MODULE)


def test_a_value_that_cannot_work_is_refused_when_the_function_is_decorated() -> None:
    pytest.importorskip("nvidia_resiliency_ext", reason="it has no wheel for every Python")
    from lowdiff.integrations import nvrx

    with pytest.raises(ConfigError, match="world_size is 1 or more and hang_seconds more than 0"):
        nvrx.restartable(world_size=0)
    with pytest.raises(ConfigError, match="got 1 and 0"):
        nvrx.restartable(world_size=1, hang_seconds=0)
