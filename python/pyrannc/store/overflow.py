"""Ranks tell each other whose gradients are not finite, so that a ``GradScaler`` decides alike on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.gradients import largest_of_each
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.store.spread_tensor import own_gradient, own_gradients


@torch.no_grad()
def share_overflow(
    listed: Callable[[], Iterable[Tensor]],
    others: Sequence[Tensor | None],
    known: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Finds out whose gradients are not finite on some rank. All ranks call it; the host waits for no device.

    Those of the parameters that the model's optimizer lists are judged together. Each other one is judged by itself, as
    nobody knows yet who steps it.

    Args:
        listed: the parameters on this rank that the model's optimizer lists.
        others: as many as the model has, on all ranks: those on this rank that the optimizer does not list, else None.
        known: 1 if gradients of ``listed`` are not finite, else 0; None if nobody has looked.
        device: this rank's.

    Returns:
        1-D, on the device: true where gradients are not finite on some rank, of ``listed``, then of each of the others.
    """
    if known is None:
        known = ~nn.utils.get_total_norm(own_gradients(listed()), math.inf).isfinite()
    found = torch.cat([known.to(device, torch.float32).reshape(1), *_not_finite(others, device)])
    sum_over_ranks(found)
    return found > 0


def _not_finite(params: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    """For each of the parameters 1 where its gradient here is not finite, else 0; to be joined."""
    grads = [None if param is None else own_gradient(param) for param in params]
    nothing = torch.zeros(len(params), dtype=torch.float32, device=device)
    found: list[Tensor] = []
    for is_there, of_run in groupby(grads, lambda grad: grad is not None and grad.numel() > 0):
        run = list(of_run)
        if is_there:
            largest = largest_of_each([grad for grad in run if grad is not None])
            found.append((~torch.stack([norm.to(device, torch.float64) for norm in largest]).isfinite()).float())
        else:
            found.append(nothing[: len(run)])
    return found
