"""Compressors define payloads: select entries, aggregate across ranks, decode by block."""

from collections.abc import Callable, Mapping
from typing import Any

from lowdiff.compressors.averaged import Averaged
from lowdiff.compressors.cast import Cast
from lowdiff.compressors.cyclic import CyclicTopK
from lowdiff.compressors.dense import Dense
from lowdiff.compressors.powersgd import PowerSGD
from lowdiff.compressors.quantize import Quantize
from lowdiff.compressors.randomk import RandomK
from lowdiff.compressors.topk import TopK
from lowdiff.errors import ConfigError
from lowdiff.protocols import Compressor

__all__ = [
    "Averaged",
    "Cast",
    "CyclicTopK",
    "Dense",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "TopK",
    "from_settings",
]

#: All compressors: a run names its own, and recovery looks it up here.
_BY_NAME: Mapping[str, Callable[..., Compressor]] = {
    kind.name: kind
    for kind in (Averaged, Cast, CyclicTopK, Dense, PowerSGD, Quantize, RandomK, TopK)
}


def refuse_unknown(compressor: Compressor) -> None:
    """Refuse a compressor that recovery would not find under its name.

    Raises:
        ConfigError: If it is not registered here, or has the name of another one.
    """
    if _BY_NAME.get(compressor.name) is not type(compressor):
        raise ConfigError(
            f"{type(compressor).__name__} is no compressor that recovery finds by its name "
            f"({compressor.name!r}), so its steps could not be decoded; use one of "
            f"{', '.join(sorted(_BY_NAME))}, or add yours to lowdiff/compressors/__init__.py"
        )


def from_settings(name: str, settings: Mapping[str, Any]) -> Compressor:
    """Rebuild the compressor that a run recorded.

    Raises:
        ConfigError: If this version of lowdiff has no such compressor.
    """
    if name not in _BY_NAME:
        raise ConfigError(
            f"the run was compressed with {name!r}, which this lowdiff does not have; "
            f"known are {', '.join(sorted(_BY_NAME))}; recover with the version that trained it"
        )
    try:
        made: Compressor = _BY_NAME[name](**settings)
    except TypeError as error:
        raise ConfigError(
            f"compressor {name!r} cannot be rebuilt from the run: {error}; recover with the lowdiff "
            "that trained it"
        ) from error
    return made
