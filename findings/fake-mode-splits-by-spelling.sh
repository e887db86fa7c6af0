#!/usr/bin/env bash
# In fake mode a build of torch without CUDA makes cuda tensors, and then takes some spellings of an operator only.
#
# Guess, written down before: under FakeTensorMode devices are labels. Either torch.empty(4, device="cuda:0") is
# refused by a build without CUDA, or every operator on it works, because no kernel runs.
#
# Seen with torch 2.13.0 (CPU build): the tensor is made, and x + y, x.narrow(0, 1, 2), x.chunk(2), x.view(2, 2) and
# torch.ops.aten.copy_(x, y) give fake cuda tensors. x[1:3], x[0], x.copy_(y) and .to("cuda") raise "PyTorch is not
# linked with support for cuda devices": what parses its arguments in Python's own bindings sets the device first.
# .to(torch.device("cuda", 0)), the same device with its number, works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy==2.4.6"
"$folder/env/bin/python" - <<'PY'
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if torch.version.cuda is not None:
    sys.exit("this needs the CPU build of torch")
with FakeTensorMode():
    x, y = torch.empty(4, device="cuda:0"), torch.empty(4, device="cuda:0")
    works = {
        "x + y": lambda: x + y,
        "x.narrow(0, 1, 2)": lambda: x.narrow(0, 1, 2),
        "x.chunk(2)": lambda: x.chunk(2)[0],
        "torch.ops.aten.copy_(x, y)": lambda: torch.ops.aten.copy_(x, y),
        '.to(torch.device("cuda", 0))': lambda: torch.empty(2).to(torch.device("cuda", 0)),
    }
    raises = {
        "x[1:3]": lambda: x[1:3],
        "x.copy_(y)": lambda: x.copy_(y),
        '.to("cuda")': lambda: torch.empty(2).to("cuda"),
    }
    found = {}
    for name, act in {**works, **raises}.items():
        try:
            found[name] = str(act().device)
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {found[name]}")
as_ever = all(found[name] == "cuda:0" for name in works)
as_ever &= all("not linked with support for cuda" in found[name] for name in raises)
sys.exit(0 if as_ever else "this has changed")
PY
