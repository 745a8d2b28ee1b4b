"""Gradients times that of the loss, which is nearly always 1."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def scaled(flats: dict[torch.dtype, Tensor], scale: Tensor | None, *, keep: bool) -> dict[torch.dtype, Tensor]:
    """Flat tensors times a scalar, in place unless they are to be kept; the host never waits for the scalar.

    Args:
        flats: by type.
        scale: no dimensions; ``None`` for 1.
    """
    if keep:
        return {dtype: flat.clone() if scale is None else flat * scale for dtype, flat in flats.items()}
    if scale is not None:
        for flat in flats.values():
            _scale(flat, scale)
    return flats


def _scale(flat: Tensor, scale: Tensor) -> None:
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
