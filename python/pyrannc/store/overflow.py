"""Gradients that are not finite on one rank are not finite on any, so that a ``GradScaler`` decides alike on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor, nn

from pyrannc.job.exchange import sum_over_ranks
from pyrannc.store.spread_tensor import first_own_gradient, own_gradients
from pyrannc.store.unscale import tell_of_overflow


@torch.no_grad()
def share_overflow(
    listed: Sequence[Tensor],
    others: Sequence[Tensor],
    names: Callable[[], Set[str]],
    known: Tensor | None,
    scale: Tensor | None,
    device: torch.device,
) -> None:
    """Makes one gradient of each set infinite that is finite here and not on some other rank. All ranks call it.

    Only where the loss was scaled: gradients of others are the script's own business. The host waits for no device.

    Args:
        listed: the parameters on this rank of one optimizer, whose gradients are judged together.
        others: the model's others, likewise.
        names: of the optimizer's parameters on all ranks.
        known: 1 if gradients of ``listed`` are not finite, else 0, which is no matter where the loss was not scaled;
            ``None`` if nobody has looked. With it, ``others`` have no gradients.
        scale: what the loss was multiplied by; None if that is not known.
        device: this rank's.
    """
    if known is None:
        own = [_overflow(own_gradients(params), device) for params in (listed, others)]
    else:
        own = [known, torch.zeros((), device=device)]
    scaled = torch.ones((), device=device) if scale is None else (scale.detach() != 1).any()
    here = torch.stack([flag.to(device, torch.float32) for flag in (*own, scaled)])
    found = here.clone()
    sum_over_ranks(found)
    spoilt = (found > 0) & (here == 0) & (found[-1:] > 0)
    tell_of_overflow(found, names)
    for place, params in enumerate((listed, others)):
        grad = first_own_gradient(params)
        if grad is not None:
            grad[(0,) * grad.dim()].masked_fill_(spoilt[place].to(grad.device), math.inf)


def _overflow(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 where some gradient is not finite, else 0."""
    largest = nn.utils.get_total_norm(grads, math.inf)
    return (~largest.isfinite()).to(device)
