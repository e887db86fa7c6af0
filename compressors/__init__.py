"""Compressors define payloads: select entries, aggregate across ranks, decode by block."""

from collections.abc import Callable, Mapping
from typing import Any

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
    "Cast",
    "CyclicTopK",
    "Dense",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "TopK",
    "from_settings",
]

_BY_NAME: Mapping[str, Callable[..., Compressor]] = {
    "cast": Cast,
    "cyclic_topk": CyclicTopK,
    "dense": Dense,
    "powersgd": PowerSGD,
    "quantize": Quantize,
    "randomk": RandomK,
    "topk": TopK,
}


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
