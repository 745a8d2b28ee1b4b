"""A Triton kernel that scales a tensor and looks for overflow; it need not read the tensor where the scale is 1."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


@triton.jit(do_not_specialize=["numel"])
def _scale_kernel(flat_ptr, scale_ptr, overflow_ptr, numel, JUDGE: tl.constexpr, TILE: tl.constexpr):
    scale = tl.load(scale_ptr)
    if JUDGE or scale != 1.0:
        place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = place < numel
        flat = tl.load(flat_ptr + place, mask=inside, other=0.0)
        wide = flat.to(tl.float64) if flat.dtype == tl.float64 else flat.to(tl.float32)
        scaled = (wide * scale.to(wide.dtype)).to(flat.dtype)
        tl.store(flat_ptr + place, scaled, mask=inside)
        difference = scaled.to(wide.dtype) - scaled.to(wide.dtype)
        if tl.max((difference != 0).to(tl.int32), axis=0) > 0:
            tl.store(overflow_ptr, 1.0)


def scale(flat: Tensor, factor: Tensor, overflow: Tensor, *, judge: bool) -> None:
    """Multiplies a flat tensor by a scalar on its device, in place; where that is not 1, or to ``judge`` is asked for,
    ``overflow`` becomes 1 if some element is not finite then."""
    if flat.numel():
        grid = (triton.cdiv(flat.numel(), _TILE),)
        _scale_kernel[grid](flat, factor, overflow, flat.numel(), JUDGE=judge, TILE=_TILE)
