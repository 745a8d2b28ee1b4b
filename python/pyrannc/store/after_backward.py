"""What ranks still owe each other when a backward has come to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from pyrannc.job import agree, process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.job.faults import collective
from pyrannc.store.delivery import Delivery
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.overflow import share_overflow
from pyrannc.store.spread_tensor import own_gradients
from pyrannc.store.store import ParamStore


@torch.no_grad()
def finish_backward(
    store: ParamStore,
    optimizer: UserOptimizer | None,
    delivery: Delivery,
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
        delivery: of this rank's gradients.
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
            listed, others = _judged_together(store, optimizer)
            # Where all gradients here are judged together, the delivery may have done that as it scaled them.
            known = delivery.take_overflow()
            if scale is None or own_gradients(others):
                known = None
            names = _names_listed(store, optimizer)
            share_overflow(listed, others, names, known, scale, process.own_device())


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


def _judged_together(store: ParamStore, optimizer: UserOptimizer | None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The optimizer's parameters here, and the model's others."""
    listed = [] if optimizer is None else optimizer.listed()
    own = set(map(id, listed))
    return listed, [param for param in store.local_params().values() if id(param) not in own]


def _names_listed(store: ParamStore, optimizer: UserOptimizer | None) -> Callable[[], Set[str]]:
    """Tells the model's parameters that the optimizer lists on any rank, for as long as both live."""
    of_model, lister = weakref.ref(store), None if optimizer is None else weakref.ref(optimizer)

    def names() -> Set[str]:
        held, user = of_model(), None if lister is None else lister()
        if held is None or user is None:
            return frozenset()
        listed = set(map(id, user.all()))
        return {name for name, param in held.params.items() if id(param) in listed}

    return names
