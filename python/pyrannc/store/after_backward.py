"""What ranks still owe each other when a backward has come to its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job import agree, process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.job.faults import collective
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.spread_tensor import own_gradients
from pyrannc.store.store import ParamStore
from pyrannc.store.unscale import tell_of_overflow


@torch.no_grad()
def finish_backward(
    store: ParamStore,
    optimizer: UserOptimizer | None,
    share: float,
    scale: Tensor | None,
    *,
    stages: int,
    spread: bool,
) -> None:
    """Makes gradients right that a rank cannot know by itself. All ranks call it, at the end of a backward.

    Args:
        store: of the model that was called.
        optimizer: the model's.
        share: this rank's rows of the call, as a share of the global batch; over all ranks they make 1.
        scale: what the loss was multiplied by; None if that is not known.
        stages: of the Plan; the ranks of one Stage have the same gradients anyway,
        spread: unless each keeps a part of some.
    """
    if process.get_world_size() == 1:
        return
    everywhere = [] if optimizer is None else [p for p in optimizer.everywhere() if p.requires_grad]
    if not everywhere and stages == 1 and not spread:
        return
    with collective("loss.backward()"):
        if everywhere:
            average(everywhere, share)
        if stages > 1 or spread:
            _judge_overflow(store, optimizer, scale)


def _judge_overflow(store: ParamStore, optimizer: UserOptimizer | None, scale: Tensor | None) -> None:
    """Lets what unscales gradients know of those of all ranks. All ranks call it."""
    if optimizer is None:
        listed = torch.zeros(len(store.used), device=process.own_device(), dtype=torch.float32)
    else:
        listed = optimizer.listed_of(store.used.values())
    overflow, listed_somewhere = store.overflow.share(store.used_here, listed)
    with DisableTorchFunctionSubclass():
        trained = {id(param): place for place, param in enumerate(store.used.values()) if param.requires_grad}
    tell_of_overflow(store, overflow, trained)
    if optimizer is not None and not optimizer.meets_others():
        _spoil_own(optimizer, (overflow & listed_somewhere & (listed == 0)).any(), scale)


def _spoil_own(optimizer: UserOptimizer, overflow: Tensor, scale: Tensor | None) -> None:
    """Where a script has left the optimizer nothing that could be asked, a gradient tells of those of other ranks."""
    grads = own_gradients(optimizer.listed())
    if grads:
        spoilt = overflow if scale is None else overflow & (scale.detach() != 1).any().to(overflow.device)
        grads[0][(0,) * grads[0].dim()].masked_fill_(spoilt.to(grads[0].device), math.inf)


def average(params: Sequence[Tensor], share: float) -> None:
    """Gives parameters that lie on all ranks the gradient of the ranks' mean loss.

    What was there before this backward is the same on all ranks, and stays so.

    Args:
        share: weight of this rank's loss.
    """
    present = agree.gather_numbers(tuple(int(param.grad is not None) for param in params))
    for param, flags in zip(params, zip(*present, strict=True), strict=True):
        if not any(flags):
            continue
        # A loss of no rows may be NaN.
        grad = param.grad if param.grad is not None and share else torch.zeros_like(param)
        total = grad * share
        sum_over_ranks(total)
        param.grad = total
