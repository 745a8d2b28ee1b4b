"""Gradients that are not finite on one rank are not finite on any, so that a ``GradScaler`` decides alike on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.gradients import largest_of_each
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.store.spread_tensor import first_own_gradient, own_gradient, own_gradients


@torch.no_grad()
def share_overflow(
    listed: Callable[[], Iterable[Tensor]],
    others: Sequence[Tensor | None],
    known: Tensor | None,
    scale: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Finds out whose gradients are not finite on some rank. All ranks call it.

    Of the parameters that the model's optimizer lists, which are judged together, one gradient becomes infinite on
    ranks where all are finite. Each other one is judged by itself, as nobody knows yet who steps it. Only where the
    loss was scaled: gradients of others are the script's own business. The host waits for no device.

    Args:
        listed: the parameters on this rank that the model's optimizer lists.
        others: all others of the model, those of other ranks as None.
        known: 1 if gradients of ``listed`` are not finite, else 0, which is no matter where the loss was not scaled;
            None if nobody has looked.
        scale: what the loss was multiplied by; None if that is not known.
        device: this rank's.

    Returns:
        1-D, on the device: true where gradients are not finite on some rank, of ``listed``, then of each of the others.
    """
    if known is None:
        known = ~nn.utils.get_total_norm(own_gradients(listed()), math.inf).isfinite()
    scaled = torch.ones((), device=device) if scale is None else (scale.detach() != 1).any()
    here = torch.stack([flag.to(device, torch.float32) for flag in (scaled, known)])
    if others:
        here = torch.cat([here, _not_finite(others, device)])
    found = here.clone()
    sum_over_ranks(found)
    overflow = (found[1:] > 0) & (found[0] > 0)
    grad = first_own_gradient(listed())
    if grad is not None:
        spoilt = overflow[0] & (here[1] == 0)
        grad[(0,) * grad.dim()].masked_fill_(spoilt.to(grad.device), math.inf)
    return overflow


def _not_finite(params: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """For each of the parameters 1 where its gradient here is not finite, else 0."""
    grads = [None if param is None else own_gradient(param) for param in params]
    present = {place: grad for place, grad in enumerate(grads) if grad is not None and grad.numel()}
    each = [torch.zeros((), dtype=torch.float32, device=device)] * len(params)
    if present:
        for place, largest in zip(present, largest_of_each(list(present.values())), strict=True):
            each[place] = (~largest.isfinite()).to(device, torch.float32)
    return torch.stack(each)
