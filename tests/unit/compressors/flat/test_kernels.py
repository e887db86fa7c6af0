"""The kernels compile for a GPU, which takes none, and keep to what their bits depend on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import torch

from lowdiff.compressors.flat import selection_on
from lowdiff.compressors.flat.selection import TorchSelection
from tests.docs.blocks import ROOT
from tests.unit.compressors.flat.test_selection import needs_triton


def test_they_compile_without_contraction_and_with_denormals(tmp_path: object) -> None:
    needs_triton()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.compressors.flat.compiled"],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    assembly: dict[str, str] = json.loads(done.stdout)
    assert len(assembly) == 3 * (8 + 10 + 4 + 1)
    for name, text in assembly.items():
        kernel = name.partition(" ")[0]
        # A fused product and sum rounds once, where PyTorch's operations in turn round twice; in a gradient of
        # low rank they are asked for.
        is_fused = bool(re.search(r"\bfma\.\w*\.?f32|\bmad\.f32", text))
        assert is_fused == (kernel in ("update", "expand", "compare")), name
        assert ".ftz" not in text, name
        divisions = set(re.findall(r"\bdiv\.\w+\.f32", text))
        assert divisions <= {"div.rn.f32"}, name
        divides = kernel in ("add_up", "write", "unscale", "update", "normalise")
        assert divides == bool(divisions), name
        assert not re.search(r"\bsqrt\.approx", text), name


def test_a_cpu_is_left_to_pytorch() -> None:
    assert isinstance(selection_on(torch.device("cpu"), {torch.float32}), TorchSelection)
