"""Ranks tell each other whose gradients are not finite, so that a ``GradScaler`` decides alike on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.gradients import largest_of_each
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.store.spread_tensor import own_gradient


@torch.no_grad()
def share_overflow(params: Sequence[Tensor | None], listed: Tensor) -> tuple[Tensor, Tensor]:
    """Finds out whose gradients are not finite on some rank. All ranks call it; the host waits for no device.

    Each parameter is judged by itself: nobody knows yet which optimizer will step it.

    Args:
        params: as many on all ranks; those of other ranks are None.
        listed: 1-D float32, on this rank's device: 1 for those that the model's optimizer lists here, else 0.

    Returns:
        Where a gradient is not finite on some rank, and what the optimizer lists on some rank.
    """
    device = listed.device
    grads = [None if param is None else own_gradient(param) for param in params]
    present = {place: grad for place, grad in enumerate(grads) if grad is not None and grad.numel()}
    found = torch.zeros(len(params), dtype=torch.float32, device=device)
    if present:
        largest = torch.stack([norm.to(device) for norm in largest_of_each(list(present.values()))])
        _put(list(present), (~largest.isfinite()).float(), found)
    both = torch.cat([found, listed])
    sum_over_ranks(both)
    anywhere = both > 0
    return anywhere[: len(params)], anywhere[len(params) :]


def _put(places: Sequence[int], flags: Tensor, found: Tensor) -> None:
    """Puts flags at increasing places, by runs of them: an index would have to travel to the device."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            found[places[first] : places[first] + end - first] = flags[first:end]
            first = end
