"""Gradients times that of the loss, which is nearly always 1."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def scale_each(flats: Iterable[Tensor], scale: Tensor) -> None:
    """Multiplies flat tensors by a scalar without dimensions, in place; on a GPU the host does not wait for it."""
    for flat in flats:
        kernels = _kernels(flat.device) if flat.is_cuda and flat.is_floating_point() else None
        if kernels is not None:
            kernels.scale(flat, scale)
        elif flat.is_cuda or scale.item() != 1:
            flat.mul_(scale)


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernel; None where Triton, or what it compiles with, is missing."""
    try:
        from pyrannc.store import scale_triton

        scale_triton.scale(torch.ones(1, device=device), torch.ones((), device=device))
    except Exception:  # a missing compiler shows in many ways, and this is only faster
        return None
    return scale_triton
