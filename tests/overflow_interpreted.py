"""Compares the kernel that finds gradients which are not finite with torch: see ``runtime/test_overflow.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.store.overflow import _TILE, _Tiles
from pyrannc.store.overflow_triton import judge

CPU = torch.device("cpu")
SIZES = [1, 5, 4096, _TILE - 1, _TILE, 2 * _TILE + 4101]
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def main() -> None:
    judged = 0
    for dtype in TYPES:
        for shift in (0, 3):
            grads = made(dtype, shift, CPU)
            expected = kinds_of(grads)
            places = [2 * number + 1 for number in range(len(grads))]
            lie = [grad.data_ptr() for grad in grads], [grad.numel() for grad in grads]
            found = torch.zeros(3, 2 * len(grads) + 1)
            judge(*_Tiles.of(places, lie, dtype.itemsize, CPU).tensors, found, dtype, _TILE)
            assert found[:, 1::2].tolist() == expected, (dtype, shift, found, expected)
            assert not found[:, 0::2].any()
            assert all(0 < sum(of_kind) < len(grads) for of_kind in expected)
            judged += len(grads)
    print(judged, "gradients")


def kinds_of(grads: Sequence[Tensor | None]) -> list[list[float]]:
    """1 for each gradient that has NaN, infinity, or minus infinity as a float32, as torch's kernel sees it."""
    real = [grad if grad is None or not grad.is_complex() else torch.view_as_real(grad) for grad in grads]
    return [
        [float(grad is not None and bool(is_there(grad.float()).any())) for grad in real]
        for is_there in (torch.isnan, torch.isposinf, torch.isneginf)
    ]


def made(dtype: torch.dtype, shift: int, device: torch.device) -> list[Tensor]:
    """Gradients of each size that are finite as float32, though large, and others with one element that is not.

    Args:
        shift: of each, in elements, from where many elements can be loaded at once.
    """
    cases = [
        (size, place, bad)
        for size in SIZES
        for place, bad in ((0, 1.0), (0, math.nan), (size // 2, -math.inf), (size - 1, math.inf))
    ]
    if dtype == torch.float64:
        cases += [(size, size // 3, bad) for size in SIZES for bad in (1e39, -1e300)]
    rooms = [(-(-(size + shift) // 64) + 1) * 64 for size, _, _ in cases]
    # What lies between gradients belongs to none.
    flat = torch.full((sum(rooms),), math.nan, dtype=dtype, device=device)
    grads, start, large = [], 0, min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for (size, place, bad), room in zip(cases, rooms, strict=True):
        grad = flat[start + shift : start + shift + size].fill_(large)
        grad[place] = bad
        grads.append(grad)
        start += room
    return grads


if __name__ == "__main__":
    main()
