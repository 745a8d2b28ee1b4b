"""Gradients times that of the loss, which is nearly always 1."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

_FEW = 2**22
"""Elements that a GPU multiplies sooner than the host launches the kernel that may not have to."""


def scale_each(flats: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies flat tensors by a scalar without dimensions, in place; on a GPU the host does not wait for it."""
    if not flats:
        return
    device = flats[0].device
    on_gpu = device.type == "cuda"
    if not on_gpu and scale.item() == 1:
        return
    kernels = _kernels(device) if on_gpu and all(flat.is_floating_point() for flat in flats) else None
    for flat in flats:
        # torch rounds the scale to the flat tensor's type first.
        is_soon = flat.numel() < _FEW and torch.promote_types(flat.dtype, scale.dtype) == flat.dtype
        if kernels is None or is_soon:
            flat.mul_(scale)
        else:
            kernels.scale(flat, scale)


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernel; None where Triton, or what it compiles with, is missing."""
    try:
        from pyrannc.store import scale_triton

        scale_triton.scale(*(torch.ones(shape, device=device) for shape in ((1,), ())))
    except Exception:  # a missing compiler shows in many ways, and this is only faster
        return None
    return scale_triton
