"""Gradients on a GPU are judged in one launch for each type, wherever they lie."""

from __future__ import annotations

import math
from itertools import cycle

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyrannc.store.overflow import _TILE, Overflow

SIZES = [(1,), (0,), (7, 3), (4, 8, 3, 3), (_TILE + 5,), (3, _TILE)]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def _gradients(round_: int) -> list[Tensor | None]:
    """Of several types and layouts; every third has an element that is not finite, others each time."""
    found: list[Tensor | None] = [None]
    bad = cycle((math.nan, math.inf, -math.inf))
    for number, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in (*TYPES, torch.complex64)):
        grad = torch.full(size, 3.0 if dtype.is_complex else torch.finfo(dtype).max, dtype=dtype, device="cuda")
        if len(size) == 4 and round_ != 1:
            grad = grad.to(memory_format=torch.channels_last)
        if (number + round_) % 3 == 0 and grad.numel():
            grad[(-1,) * grad.dim()] = next(bad)
        found.append(grad)
    # With a gap between rows, and on the host.
    found += [torch.full((4, 6), math.nan, device="cuda")[:, :3], torch.ones(4, 6, device="cuda")[:, :3]]
    return [*found, torch.full((3,), math.inf), torch.ones(3)]


def test_gradients_of_all_kinds_are_judged() -> None:
    overflow = Overflow()
    for round_ in (0, 0, 1, 2):
        grads = _gradients(round_)
        expected = [float(grad is not None and not bool(grad.isfinite().all())) for grad in grads]
        found = overflow._not_finite(grads, torch.zeros(len(grads), device="cuda"))
        assert found.tolist() == expected
        assert 0 < sum(expected) < len(expected)


def test_many_gradients_take_one_launch_and_no_wait() -> None:
    grads = [torch.ones(50, 3, device="cuda") for _ in range(200)]
    overflow, like = Overflow(), torch.zeros(200, device="cuda")
    overflow._not_finite(grads, like)
    grads[7][2, 1] = math.nan
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        found = overflow._not_finite(grads, like)
    assert found.nonzero().tolist() == [[7]]
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "judge" in name]) == 1, kernels
    assert len(kernels) <= 2, kernels
