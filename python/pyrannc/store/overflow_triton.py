"""A Triton kernel that tells which of many tensors are not finite, and what they have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
_STEP = 4096


@triton.jit
def _is_finite(values):
    return tl.abs(values.to(tl.float32)) < float("inf")


@triton.jit
def _is_of_kind(values, KIND: tl.constexpr):
    wide = values.to(tl.float32)
    if KIND == 0:
        return wide != wide
    return wide == (float("inf") if KIND == 1 else float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["addresses", "sizes", "places"])
def _judge_kernel(
    addresses, sizes, places, found_ptr, count, DTYPE: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    tl.static_assert(TILE % STEP == 0, "a whole tile is read in whole steps")
    tile = tl.program_id(0)
    address = tl.load(addresses + tile)
    size = tl.load(sizes + tile)
    first = address.to(tl.pointer_type(DTYPE))
    lane = tl.arange(0, STEP)
    finite = tl.full((STEP,), 1, tl.int1)
    if (size == TILE) & (address % 16 == 0):
        first = tl.multiple_of(first, 16)
        for start in range(0, TILE, STEP):
            finite &= _is_finite(tl.load(first + start + lane))
    else:
        for start in range(0, TILE, STEP):
            finite &= _is_finite(tl.load(first + start + lane, mask=start + lane < size, other=0.0))
    if tl.min(finite.to(tl.int32), 0) == 0:
        place = tl.load(places + tile)
        for kind in tl.static_range(3):
            is_there = tl.full((STEP,), 0, tl.int1)
            for start in range(0, TILE, STEP):
                values = tl.load(first + start + lane, mask=start + lane < size, other=0.0)
                is_there |= _is_of_kind(values, kind)
            if tl.max(is_there.to(tl.int32), 0) == 1:
                tl.store(found_ptr + kind * count + place, 1.0)


def judge(addresses: Tensor, sizes: Tensor, places: Tensor, found: Tensor, dtype: torch.dtype, tile: int) -> None:
    """Writes 1 where a tensor has an element that is NaN, infinity, or minus infinity as a float32.

    Args:
        addresses: of tiles, of tensors of one type on this device; 1-D int64, as the next two.
        sizes: numbers of elements, from 1 to ``tile``.
        places: in ``found``, of the tensors.
        found: (3, tensors or more) float32, without gaps.
        dtype: of the tensors.
        tile: elements of a whole tile; a multiple of 4,096.
    """
    _judge_kernel[(len(addresses),)](
        addresses, sizes, places, found, found.shape[1], _TYPES[dtype], TILE=tile, STEP=_STEP
    )  # fmt: skip
