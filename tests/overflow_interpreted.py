"""Compares the kernel that finds gradients which are not finite with torch: see ``runtime/test_overflow.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyrannc.store.overflow import _TILE, _Tiles
from pyrannc.store.overflow_triton import judge

CPU = torch.device("cpu")
SIZES = [1, 5, 4096, _TILE - 1, _TILE, _TILE + 1, 2 * _TILE + 4101]


def main() -> None:
    judged = 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        # Most lie where a kernel cannot load many elements at once.
        for gap in (0, 3):
            grads = made(dtype, gap)
            expected = [float(not bool(grad.isfinite().all())) for grad in grads]
            places = [2 * number + 1 for number in range(len(grads))]
            lie = [grad.data_ptr() for grad in grads], [grad.numel() for grad in grads]
            found = torch.zeros(2 * len(grads) + 1)
            judge(*_Tiles.of(places, lie, dtype.itemsize, CPU).tensors, found, dtype, _TILE)
            assert found[1::2].tolist() == expected, (dtype, gap, found, expected)
            assert not found[0::2].any()
            assert 0 < sum(expected) < len(expected)
            judged += len(grads)
    print(judged, "gradients")


def made(dtype: torch.dtype, gap: int) -> list[Tensor]:
    """Gradients of each size that are finite, though large, and others with one element that is not."""
    bad = [None, (0, math.nan), (-1, math.inf), (-1, -math.inf)]
    cases = [(size, item) for size in SIZES for item in bad]
    # What lies between gradients belongs to none.
    flat = torch.full((sum(size + gap for size, _ in cases),), math.nan, dtype=dtype)
    grads, start = [], 0
    for size, item in cases:
        grad = flat[start : start + size].fill_(torch.finfo(dtype).max)
        if item is not None:
            grad[item[0]] = item[1]
        grads.append(grad)
        start += size + gap
    return grads


if __name__ == "__main__":
    main()
