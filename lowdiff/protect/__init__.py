"""How the steps of a run are protected: strategies by their names, and copies on other nodes around one."""

from __future__ import annotations

from dataclasses import replace

from lowdiff.core.events import Code
from lowdiff.errors import ConfigError
from lowdiff.protect.copied import Copied
from lowdiff.protect.gradients.strategy import GradientsStrategy
from lowdiff.protect.log.strategy import LogStrategy
from lowdiff.protect.replica.strategy import ReplicaStrategy
from lowdiff.protect.strategy import Copyable, Strategy
from lowdiff.protect.survivors.strategy import SurvivorsStrategy
from lowdiff.protocols import Compressor
from lowdiff.settings import Settings

_BY_NAME: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (LogStrategy(), GradientsStrategy(), ReplicaStrategy(), SurvivorsStrategy())
}


def chosen(name: object, compressor: Compressor | None) -> Strategy:
    """Return the strategy that a user chose, or what is usual with a compressor, or without one.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name is None:
        name = ReplicaStrategy.name if compressor is None else LogStrategy.name
    if not isinstance(name, str) or name not in _BY_NAME:
        known = ", ".join(f'"{known}"' for known in _BY_NAME)
        raise ConfigError(f"strategy is one of {known}, or None, got {name!r}")
    return _BY_NAME[name]


def usual_for(settings: Settings, *, on_host: bool) -> Settings:
    """Return settings with the strategy that is usual for a model, where the user chose none.

    Args:
        settings: As the user gave them.
        on_host: Whether the model is on CPUs.

    Raises:
        ConfigError: If the settings do not go with it.
    """
    if not settings.is_usual:
        return settings
    return _with_strategy(settings, ReplicaStrategy.name if on_host else GradientsStrategy.name)


def usual_without_memory(settings: Settings, refusal: ConfigError, rank: int) -> Settings:
    """Return settings with the strategy that is usual where staging memory is short; said on rank 0.

    Args:
        settings: Of the run that was refused.
        refusal: Why.
        rank: This one.

    Raises:
        ConfigError: As refused, if the user chose the strategy or no other one needs less.
    """
    if not settings.is_usual or settings.strategy != GradientsStrategy.name:
        raise ConfigError(str(refusal)) from None
    if rank == 0:
        Code.GRADIENTS_DO_NOT_FIT.warn(
            f"{refusal}. Until then this run takes strategy survivors: where all ranks die at once, training goes back to "
            "the last full snapshot"
        )
    return _with_strategy(settings, SurvivorsStrategy.name)


def _with_strategy(settings: Settings, name: str) -> Settings:
    """Return settings with another strategy, which leaves gradients as they are, too."""
    strategy, used = _BY_NAME[name], settings.compressor
    is_reproducible = bool(getattr(used, "reproducible", False))
    settings = replace(
        settings,
        strategy=name,
        compressor=strategy.compressor(None, reproducible=is_reproducible),
    )
    strategy_of(settings).refuse(settings)
    return settings


def strategy_of(settings: Settings) -> Strategy:
    """Return what protects a run with these settings."""
    strategy = _BY_NAME[settings.strategy]
    if settings.copies > 1 and isinstance(strategy, Copyable):
        return Copied(strategy)
    return strategy
