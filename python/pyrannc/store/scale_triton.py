"""A Triton kernel that scales a tensor; it does not touch the tensor where the scale is 1."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit(do_not_specialize=["numel"])
def _scale_kernel(flat_ptr, scale_ptr, numel, TILE: tl.constexpr):
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < numel
        flat = tl.load(flat_ptr + place, mask=inside, other=0.0)
        wide = flat.to(tl.float64) if flat.dtype == tl.float64 else flat.to(tl.float32)
        tl.store(flat_ptr + place, (wide * scale.to(wide.dtype)).to(flat.dtype), mask=inside)


def scale(flat: Tensor, factor: Tensor) -> None:
    """Multiplies a flat tensor by a scalar on its device, in place."""
    if flat.numel():
        _scale_kernel[(triton.cdiv(flat.numel(), _TILE),)](flat, factor, flat.numel(), TILE=_TILE)
