#!/usr/bin/env bash
# Triton's interpreter (TRITON_INTERPRET=1), in which kernels are tested on machines without a GPU, does not compute as a
# GPU does in three places, without a word: a float32 becomes a bfloat16 by cutting its lower bits off, a denormal bfloat16
# becomes another number as float32, and `tl.fma` rounds the product before it adds.
#
# Guess before running: the interpreter is slow and exact. It is the reference that a kernel's bits are tested against:
# conversions round to nearest, ties to even, as PTX's do, and a fused product and sum rounds once, as the name says.
#
# Seen with triton 3.7.0 and numpy as the product pins it, Linux x86-64: of 10,000 normally distributed float32, 4,900 to
# 5,100 become the bfloat16 next to the one that PyTorch's conversion gives, always the one nearer to zero; the denormal
# bfloat16 1.01e-39 is read as 4.41e-39; and of 10,000 products and sums about a quarter differ from those rounded once. A test of bits in the
# interpreter therefore passes with kernels that are right on no device, or fails with kernels that are right on all.
#
# Exits with 1 once one of the three has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 triton==3.7.0 numpy==2.4.6
cat > "$folder/convert.py" <<'PY'
import torch
import triton
import triton.language as tl

N = 10_000


@triton.jit
def narrow(source, target, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place).to(tl.bfloat16))


@triton.jit
def widen(source, target, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place).to(tl.float32))


@triton.jit
def fused(a, b, c, target, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.fma(tl.load(a + place), tl.load(b + place), tl.load(c + place)))


torch.manual_seed(0)
size = 1 << 14
values = torch.randn(size)
cut = torch.empty(size, dtype=torch.bfloat16)
narrow[(1,)](values, cut, SIZE=size)
right = values.bfloat16()
differing = cut != right
nearer = cut.float().abs()[differing] < right.float().abs()[differing]
print(f"float32 to bfloat16: {differing[:N].sum()} of {N} differ, {nearer.float().mean():.0%} of them nearer to zero")

tiny = torch.full((size,), 1e-39).bfloat16()
wide = torch.empty(size)
widen[(1,)](tiny, wide, SIZE=size)
print(f"a denormal bfloat16 ({tiny[0].item():.3g}) as float32: {wide[0].item():.3g}")

a, b, c = torch.randn(3, size).unbind()
found = torch.empty(size)
fused[(1,)](a, b, c, found, SIZE=size)
once = (a.double() * b.double() + c.double()).float()
twice = a * b + c
print(f"tl.fma: {(found != once)[:N].sum()} of {N} are not rounded once, {(found != twice)[:N].sum()} not twice")

is_cut = bool(differing.float().mean() > 0.4 and nearer.all())
raise SystemExit(not (is_cut and wide[0] != tiny[0].item() and (found != once).any() and not (found != twice).any()))
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/convert.py"
