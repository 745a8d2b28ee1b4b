"""Gradients on a GPU are judged in one launch for each type, wherever they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyrannc.store.overflow import Overflow
from tests.overflow_interpreted import TYPES, kinds_of, made

GPU = torch.device("cuda", 0)


def _judged(overflow: Overflow, grads: Sequence[Tensor | None]) -> None:
    """Compares with torch."""
    expected = kinds_of(grads)
    assert overflow._kinds(grads, GPU).tolist() == expected
    assert 0 < sum(map(sum, expected)) < len(grads)


@pytest.mark.parametrize("shift", [0, 3])
def test_the_kernel_judges_all_sizes_and_places(shift: int) -> None:
    overflow = Overflow()
    grads = [None, *(grad for dtype in TYPES for grad in made(dtype, shift, GPU))]
    # One of images, with its channels last.
    images = torch.ones(4, 8, 3, 3, device=GPU).to(memory_format=torch.channels_last)
    images[3, 7, 2, 2] = math.nan
    for _ in range(2):
        _judged(overflow, [*grads, images, images.isfinite().float()])
    assert overflow._tiles.keys() == set(TYPES)


def test_what_has_gaps_or_lies_elsewhere_is_judged() -> None:
    overflow, wide = Overflow(), torch.ones(4, 6, device=GPU)
    wide[:, 4] = math.inf
    complex_ = torch.full((3,), math.nan, dtype=torch.complex64, device=GPU)
    _judged(overflow, [wide[:, :3], wide[:, 3:], torch.full((3,), math.inf), torch.ones(3), complex_])
    # Torch gives a tensor of zeros no memory.
    nothing = torch._efficientzerotensor((5,), device=GPU)
    _judged(overflow, [nothing, torch.full((3,), math.inf, device=GPU)])
    assert not overflow._tiles


def test_many_gradients_take_one_launch_and_no_wait() -> None:
    # Scripts that hold gradients have them at two places in turns.
    places = [[torch.ones(50, 3, device=GPU) for _ in range(200)] for _ in range(2)]
    overflow = Overflow()
    overflow._kinds(places[0], GPU)
    places[0][7][2, 1] = math.nan
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        overflow._kinds(places[1], GPU)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            found = overflow._kinds(places[0], GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.nonzero().tolist() == [[0, 7]]
    kernels = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in kernels if "judge" in name]) == 1, kernels
    assert len(kernels) <= 2, kernels
