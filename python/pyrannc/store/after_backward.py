"""What ranks still owe each other when a backward has come to its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyrannc.capture.torch_internals.gradients import at_end_of_backward, graph_task, tensor_hooks
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.job.faults import collective
from pyrannc.store.in_ddp import in_ddp, leads_into_a_model
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.spread_tensor import own_gradients
from pyrannc.store.store import ParamStore
from pyrannc.store.unscale import tell_of_overflow

_MOST_ENDINGS = 8
"""Backwards that are nested, or have not come to their end."""


@dataclass(frozen=True)
class CallOfBackward:
    """A call whose outputs a backward begins with or comes by.

    Attributes:
        store: of the model that was called.
        optimizer: the model's.
        share: this rank's rows of the call, as a share of the global batch; over all ranks they make 1.
        scale: what the loss was multiplied by; None if that is not known.
        stages: of the Plan; the ranks of one Stage have the same gradients anyway,
        spread: unless each keeps a part of some.
    """

    store: ParamStore
    optimizer: UserOptimizer | None
    share: float
    scale: Tensor | None
    stages: int
    spread: bool

    @property
    def judges_overflow(self) -> bool:
        """Ranks have gradients that others do not have."""
        return self.stages > 1 or self.spread


@dataclass
class _Ending:
    """What a backward that runs has come by.

    Attributes:
        calls: of wrapped models.
        touched: ids of parameters beside models that have got a gradient.
    """

    calls: list[CallOfBackward] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)


_endings: dict[int, _Ending] = {}
_watched = WeakIdKeyDictionary()
_last_share = 1.0


def note_share(share: float) -> None:
    """Takes note of this rank's rows of a call, which are those of what the script computes beside the model next."""
    global _last_share
    _last_share = share


def finish_backward(call: CallOfBackward) -> None:
    """Inside of a backward: makes gradients right, at its end, that a rank cannot know by itself. All ranks call it."""
    if process.get_world_size() > 1:
        _ending().calls.append(call)


def watch_beside() -> None:
    """From now on, gradients of what optimizers train beside models are averaged after every backward."""
    if process.get_world_size() == 1:
        return
    for param in [param for optimizer in UserOptimizer.deployed() for param in optimizer.everywhere()]:
        if param not in _watched and param.requires_grad:
            param.register_post_accumulate_grad_hook(_note_touched)  # type: ignore[no-untyped-call]  # torch has no types for it
            _watched[param] = True


def _note_touched(param: Tensor) -> None:
    _ending().touched.add(id(param))


def _ending() -> _Ending:
    task = graph_task()
    if task not in _endings:
        for broken_off in [*_endings][: len(_endings) - _MOST_ENDINGS + 1]:
            del _endings[broken_off]
        _endings[task] = _Ending()
        at_end_of_backward(lambda: _finish(_endings.pop(task)))
    return _endings[task]


@torch.no_grad()
def _finish(ending: _Ending) -> None:
    beside = any(call.optimizer is not None and _beside(call.optimizer) for call in ending.calls)
    if not (beside or ending.touched or any(call.judges_overflow for call in ending.calls)):
        return
    with collective("loss.backward()"):
        if beside or ending.touched:
            _average_beside(ending)
        for call in ending.calls:
            if call.judges_overflow:
                _judge_overflow(call.store, call.optimizer, call.scale)


def _beside(optimizer: UserOptimizer) -> list[Tensor]:
    return [param for param in optimizer.everywhere() if param.requires_grad]


@dataclass(frozen=True)
class _Told:
    """What a rank says of its backward.

    Attributes:
        uneven: its share is not that of all ranks.
        differ: its calls had different shares.
        present: of each optimizer by number, which of its parameters beside models have gradients.
    """

    uneven: bool
    differ: bool
    present: Mapping[int, tuple[bool, ...]]


def _average_beside(ending: _Ending) -> None:
    of_calls = [call.optimizer for call in ending.calls if call.optimizer is not None]
    touched = [own for own in UserOptimizer.deployed() if any(id(p) in ending.touched for p in own.everywhere())]
    shares = {call.share for call in ending.calls} or {_last_share}
    own_share = next(iter(shares))
    told = _Told(
        uneven=not math.isclose(own_share * process.get_world_size(), 1.0),
        differ=len(shares) > 1,
        present={
            own.number: tuple(_is_present(p, own in of_calls, ending) for p in _beside(own))
            for own in {own.number: own for own in [*of_calls, *touched]}.values()
        },
    )
    everyone: list[_Told] = agree.gather_objects(told)
    params: dict[int, Tensor] = {}
    for number in sorted({number for found in everyone for number in found.present}):
        flags = zip(*(found.present[number] for found in everyone if number in found.present), strict=True)
        own = _beside(UserOptimizer.numbered(number))
        params |= {id(param): param for param, there in zip(own, flags, strict=True) if any(there)}
    if not params:
        return
    if any(found.differ for found in everyone):
        raise RaNNCError(
            "one backward comes by calls of models in which a rank had different shares of the batch, and parameters "
            "beside the models get gradients in it, which belong to one share or the other: call backward() for each "
            "loss by itself, or put those layers into the model"
        )
    by_ddp = in_ddp(params.values())
    behind = [params[key] for key in by_ddp if not leads_into_a_model(params[key])]
    if behind and any(found.uneven for found in everyone):
        raise RaNNCError(
            f"{len(behind)} parameters of layers in DistributedDataParallel behind a model, in its optimizer, get the "
            "plain mean of the ranks' gradients, though ranks bring different numbers of rows: leave "
            "DistributedDataParallel out, their gradients are averaged by rows then"
        )
    ours = [param for key, param in params.items() if key not in by_ddp]
    _refuse_hooks(ours)
    average(ours, own_share)


def _refuse_hooks(params: Sequence[Tensor]) -> None:
    """Raises of hooks that have seen this rank's gradient, before the mean of all. All ranks call it."""
    hooks = [hook for param in params for found in tensor_hooks(param) for hook in (found or {}).values()]
    number = sum(hook is not _note_touched for hook in hooks)
    if any(count for (count,) in agree.gather_numbers((number,))):
        raise RaNNCError(
            "a parameter beside the model, in its optimizer, has a hook on its gradient, which gets that of one rank's "
            "rows, before ranks average it: do it to .grad after loss.backward(), or put the layer into the model"
        )


def _is_present(param: Tensor, of_call: bool, ending: _Ending) -> bool:
    return id(param) in ending.touched or (of_call and param.grad is not None)


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
    """Gives parameters that lie on all ranks the gradient of the ranks' mean loss. All ranks call it with the same.

    What was there before this backward is the same on all ranks, and stays so.

    Args:
        share: weight of this rank's loss.
    """
    for param in params:
        # A loss of no rows may be NaN.
        grad = param.grad if param.grad is not None and share else torch.zeros_like(param)
        total = grad * share
        sum_over_ranks(total)
        param.grad = total
