"""What ranks still owe each other when a backward has come to its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job import agree, process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.job.faults import collective
from pyrannc.store.delivery import Delivery
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.overflow import share_overflow
from pyrannc.store.spread_tensor import own_gradients
from pyrannc.store.store import ParamStore
from pyrannc.store.unscale import tell_of_overflow


@torch.no_grad()
def finish_backward(
    store: ParamStore,
    optimizer: UserOptimizer | None,
    delivery: Delivery,
    share: float,
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
            _judge_overflow(store, optimizer, delivery)


def _judge_overflow(store: ParamStore, optimizer: UserOptimizer | None, delivery: Delivery) -> None:
    """Lets what unscales gradients know of those of all ranks. All ranks call it."""
    listed_ids = frozenset() if optimizer is None else optimizer.listed_ids
    numbered = enumerate(map(id, store.used.values()), start=1)
    places = {param: place for place, param in numbered if param not in listed_ids}
    others = [param if id(param) in places and store.is_local(name) else None for name, param in store.used.items()]
    # The delivery may have judged all gradients here as it scaled them.
    known = delivery.take_overflow()
    if own_gradients(param for param in others if param is not None):
        known = None
    listed = optimizer.listed if optimizer is not None else list
    overflow = share_overflow(listed, others, known, process.own_device())
    with DisableTorchFunctionSubclass():
        trained = [id(param) for param in store.params.values() if param.requires_grad]
    tell_of_overflow(store, overflow, {param: places.get(param, 0) for param in trained})


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
