"""How the steps of a run are protected: strategies by their names, and copies on other nodes around one."""

from __future__ import annotations

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


def strategy_of(settings: Settings) -> Strategy:
    """Return what protects a run with these settings."""
    strategy = _BY_NAME[settings.strategy]
    if settings.copies > 1 and isinstance(strategy, Copyable):
        return Copied(strategy)
    return strategy
