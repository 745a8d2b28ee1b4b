"""Gradients times that of the loss, which is nearly always 1, and whether they are finite then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def scale_each(flats: Sequence[Tensor], scale: Tensor, *, judge: bool) -> Tensor | None:
    """Multiplies flat tensors by a scalar without dimensions, in place; on a GPU the host does not wait for it.

    Args:
        judge: look whether elements are finite also where the scale is 1, and nothing has to be read.

    Returns:
        1 if some element is not finite then, else 0, a scalar; 0 where nothing is read; ``None`` if nobody looked.
    """
    if not flats:
        return None
    device = flats[0].device
    on_gpu = device.type == "cuda"
    if not on_gpu and scale.item() == 1:
        return None if judge else torch.zeros(())
    kernels = _kernels(device) if on_gpu and all(flat.is_floating_point() for flat in flats) else None
    if kernels is None:
        for flat in flats:
            flat.mul_(scale)
        return None
    overflow = torch.zeros((), device=device)
    for flat in flats:
        kernels.scale(flat, scale, overflow, judge=judge)
    return overflow


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernel; None where Triton, or what it compiles with, is missing."""
    try:
        from pyrannc.store import scale_triton

        for judge in (True, False):
            scale_triton.scale(*(torch.ones(shape, device=device) for shape in ((1,), (), ())), judge=judge)
    except Exception:  # a missing compiler shows in many ways, and this is only faster
        return None
    return scale_triton
