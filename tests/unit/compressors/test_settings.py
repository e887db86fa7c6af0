"""Compressors' settings: what is refused, and how they come back from a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK, from_settings
from lowdiff.compressors.exchange import exchange
from lowdiff.core.layout import layout_of
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.persistence.format.values import decode, encode
from lowdiff.protocols import Compressor
from lowdiff.types import Layout, ParameterSpec
from tests.contract.compressors import FAMILY


@pytest.mark.parametrize("name", FAMILY)
def test_what_a_run_records_of_a_compressor_rebuilds_it(name: str) -> None:
    compressor = FAMILY[name]
    stored = decode(encode({"name": compressor.name, "settings": dict(compressor.settings())}))
    assert from_settings(stored["name"], stored["settings"]) == compressor


def test_settings_rebuild_an_equal_compressor() -> None:
    compressor: Compressor = TopK(density=0.25, dense_below=7)
    assert (compressor.name, compressor.settings()) == (
        "topk",
        {
            "density": 0.25,
            "dense_below": 7,
            "value_bits": None,
            "value_dtype": None,
            "warmup": 0,
        },
    )
    assert from_settings(compressor.name, compressor.settings()) == compressor
    assert TopK(density=0.25).settings()["dense_below"] == 1024


def test_what_this_version_cannot_rebuild_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"compressed with 'signsgd'.*known are averaged, cast,.* topk"
    ):
        from_settings("signsgd", {})
    with pytest.raises(ConfigError, match=r"'topk' cannot be rebuilt from the run.*'momentum'"):
        from_settings("topk", {"density": 0.1, "momentum": 0.9})


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TopK(density=0.1).density = 0.2  # type: ignore[misc]


def test_names_differ() -> None:
    kinds: list[Compressor] = [
        TopK(1), CyclicTopK(1), RandomK(1), PowerSGD(1), Quantize(), Cast()
    ]  # fmt: skip
    assert len({compressor.name for compressor in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [TopK, CyclicTopK, RandomK])
@pytest.mark.parametrize("density", [0, -0.1, 1.0001, 2, math.nan, math.inf, -math.inf])
def test_a_density_outside_of_0_to_1(kind: Callable[..., Any], density: float) -> None:
    with pytest.raises(ConfigError, match=r"density must be in \(0, 1\].*0\.01 keeps 1 %"):
        kind(density)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0.1, dense_below=-1), "dense_below counts elements, got -1"),
        (lambda: CyclicTopK(0.1, dense_below=-1), "dense_below counts elements, got -1"),
        (lambda: RandomK(0.1, seed=-1), r"seed must be an int in 0 \.\."),
        (lambda: RandomK(0.1, seed=1 << 63), r"seed must be an int in 0 \.\."),
        (lambda: from_settings("randomk", {"density": 0.1, "seed": 0.5}), "seed must be an int"),
        (lambda: TopK(0.1, warmup=-3), "warmup counts steps, got -3"),
        (lambda: TopK(0.1, value_dtype=torch.float32), "value_dtype is torch.bfloat16 or"),
        (
            lambda: TopK(0.1, value_bits=8),
            "value_bits is 2, 4 or None, got 8; None keeps the dtype",
        ),
        (lambda: CyclicTopK(0.1, value_bits=1), "value_bits is 2, 4 or None, got 1"),
        (
            lambda: from_settings("randomk", {"density": 0.1, "value_bits": 2.0}),
            "value_bits is 2, 4",
        ),
        (
            lambda: TopK(0.1, value_dtype="bfloat16", value_bits=2),
            r"value_bits=2 leaves nothing for value_dtype=torch\.bfloat16 to round; leave out one",
        ),
        (lambda: PowerSGD(0), r"matrix_rank must be in 1 \.\. 256, got 0; 1 to 4 is usual"),
        (lambda: PowerSGD(-2), "matrix_rank counts columns, got -2"),
        (lambda: PowerSGD(257), r"matrix_rank must be in 1 \.\. 256, got 257"),
        (
            lambda: from_settings("powersgd", {"matrix_rank": 1.5}),
            "matrix_rank counts columns, got 1.5",
        ),
        (lambda: Quantize(16), "bits is 8 or 4, got 16; Cast takes 16"),
        (lambda: Quantize(0), "bits is 8 or 4, got 0"),
        (lambda: Quantize(8, rounding="up"), "rounding is one of"),
        (lambda: Quantize(8, seed=-1), r"seed must be an int in 0 \.\."),
        (lambda: Cast(torch.float32), "dtype is torch.bfloat16 or torch.float16"),
        (lambda: Cast("int8"), "dtype is torch.bfloat16 or torch.float16, got 'int8'"),
    ],
)
def test_values_out_of_range(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("compressor", "dtype"),
    [
        (Cast(torch.float16), torch.bfloat16),
        (Cast(torch.bfloat16), torch.float16),
        (TopK(0.1, value_dtype=torch.float16), torch.bfloat16),
    ],
    ids=str,
)
def test_a_dtype_that_a_compressor_cannot_take_is_named(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    layout = layout_of([("head.weight", torch.nn.Parameter(torch.zeros(3, dtype=dtype)))])
    with pytest.raises(UnsupportedModel, match=r"'head\.weight' is b?float16, whose values"):
        compressor.residual_layout(layout)


def test_the_density_falls_to_its_value_while_it_warms_up() -> None:
    compressor = TopK(0.001, dense_below=0, warmup=10)
    kept = [compressor.kept(1_000_000, step) for step in range(12)]
    assert kept[0] == 250_000
    assert kept[5] == pytest.approx(250_000 * math.sqrt(0.001 / 0.25), rel=1e-3)
    assert kept[10] == kept[11] == compressor.kept(1_000_000) == 1000
    assert kept == sorted(kept, reverse=True)
    assert TopK(0.5, dense_below=0, warmup=10).kept(100, 1) == 50


@pytest.mark.parametrize("compressor", [TopK(0.1), CyclicTopK(0.1), RandomK(0.1)], ids=repr)
def test_positions_that_need_more_than_31_bits_are_refused(compressor: Compressor) -> None:
    large = ParameterSpec("table", (1 << 31, 1), (1, 1), "float32", 0)
    with pytest.raises(UnsupportedModel, match=r"'table' has 2,147,483,648 elements.* 31 bits"):
        compressor.residual_layout(Layout((large,)))
    fits = dataclasses.replace(large, shape=((1 << 31) - 1, 1))
    assert compressor.residual_layout(Layout((fits,))).parameters
    PowerSGD(2).residual_layout(Layout((large,)))


def test_so_is_a_bucket_of_that_size() -> None:
    bucket = torch.zeros(1).expand(1 << 31)
    with pytest.raises(UnsupportedModel, match="bucket_cap_mb"):
        exchange(bucket, torch.zeros(1, dtype=torch.int64), torch.zeros(1), stamp=0, group=None)
