"""What ranks still owe each other when a backward has come to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

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
from pyrannc.store.own_listed import steps_of
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
        settle: has its gradients be there, at the end of the backward.
    """

    store: ParamStore
    optimizer: UserOptimizer | None
    share: float
    scale: Tensor | None
    stages: int
    spread: bool
    settle: Callable[[], None]

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
_shares: WeakKeyDictionary[ParamStore, set[float]] = WeakKeyDictionary()
"""By models, of calls since the last backward, or, without any, of the calls before."""
_is_known = False
_trained: dict[int, int] = {}
"""By ids of parameters, how often their optimizer had stepped when first a backward since that call gave them gradients
without a model."""


def note_share(store: ParamStore, share: float) -> None:
    """Takes note of this rank's rows of a call, which are those of what the script computes beside the model next."""
    global _is_known
    if not _is_known:
        _shares.clear()
    _shares.setdefault(store, set()).add(share)
    _is_known = True
    _trained.clear()


def forget_shares(store: ParamStore) -> None:
    """A model is taken back: what the script computes next is of other rows."""
    _shares.pop(store, None)


def _take_shares(calls: Sequence[CallOfBackward]) -> set[float]:
    """This rank's shares of the batches that a backward with these calls is about."""
    global _is_known
    if calls:
        _shares.clear()
    for call in calls:
        _shares.setdefault(call.store, set()).add(call.share)
    _is_known = False
    return set[float]().union(*_shares.values()) or {1 / process.get_world_size()}


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
            _watched[param] = param.register_post_accumulate_grad_hook(_note_touched)  # type: ignore[no-untyped-call]  # torch has no types for it


def forget_beside(params: Iterable[Tensor]) -> None:
    """A model is about to have these: they are not beside one."""
    for param in params:
        if param in _watched:
            _watched[param].remove()
            del _watched[param]


def _note_touched(param: Tensor) -> None:
    _ending().touched.add(id(param))


def _ending() -> _Ending:
    task = graph_task()
    if task not in _endings:
        while len(_endings) >= _MOST_ENDINGS:
            del _endings[next(iter(_endings))]
        _endings[task] = _Ending()
        at_end_of_backward(lambda: _finish(_endings.pop(task)))
    return _endings[task]


@torch.no_grad()
def _finish(ending: _Ending) -> None:
    shares = _take_shares(ending.calls)
    beside = any(_trains_beside(optimizer, ending) for optimizer in UserOptimizer.deployed())
    if not (beside or any(call.judges_overflow for call in ending.calls)):
        return
    with collective("loss.backward()"):
        if beside:
            _average_beside(ending, shares)
        for call in ending.calls:
            if call.judges_overflow:
                call.settle()
                _judge_overflow(call.store, call.optimizer, call.scale)


def _trains_beside(optimizer: UserOptimizer, ending: _Ending) -> bool:
    """True where ranks have gradients to average of what it trains beside models: equal on all of them."""
    params = optimizer.everywhere()
    if any(call.optimizer is optimizer for call in ending.calls):
        return any(param.requires_grad for param in params)
    return any(id(param) in ending.touched for param in params)


@dataclass(frozen=True)
class _Told:
    """What a rank says of its backward.

    Attributes:
        present: of each optimizer by number, which of its parameters beside models have gradients.
        several_shares: its calls had different shares.
        unknown_rows: it comes by no call, and the optimizer has stepped since another one came by none.
        uneven: its share is not that of all ranks.
        behind_in_ddp: layers in DistributedDataParallel have gradients that did not come through a model.
        hooked: a hook has seen one of this rank's gradients.
    """

    present: Mapping[int, tuple[bool, ...]]
    several_shares: bool
    unknown_rows: bool
    uneven: bool
    behind_in_ddp: bool
    hooked: bool


def _average_beside(ending: _Ending, shares: Set[float]) -> None:
    lists = {own.number: own.everywhere() for own in UserOptimizer.deployed()}
    by_ddp = in_ddp(param for params in lists.values() for param in params)
    share = next(iter(shares))
    of_calls = {call.optimizer.number for call in ending.calls if call.optimizer is not None}
    present = {
        number: tuple(id(p) in ending.touched or (number in of_calls and p.grad is not None) for p in params)
        for number, params in lists.items()
    }
    own = [p for number, there in present.items() for p, has in zip(lists[number], there, strict=True) if has]
    everyone: list[_Told] = agree.gather_objects(
        _Told(
            present,
            several_shares=len(shares) > 1,
            unknown_rows=not ending.calls and _train_again(ending.touched),
            uneven=not math.isclose(share * process.get_world_size(), 1.0),
            behind_in_ddp=any(id(param) in by_ddp and not leads_into_a_model(param) for param in own),
            hooked=any(_is_hooked(param) for param in own if id(param) not in by_ddp),
        )
    )
    params: dict[int, Tensor] = {}
    # An optimizer that the script has dropped may still be there on some ranks.
    for number in sorted(set.intersection(*(set(told.present) for told in everyone))):
        flags = zip(*(told.present[number] for told in everyone), strict=True)
        params |= {id(param): param for param, there in zip(lists[number], flags, strict=True) if any(there)}
    if params:
        _refuse(everyone)
        average([param for key, param in params.items() if key not in by_ddp], share)


def _train_again(touched: set[int]) -> bool:
    """Notes that parameters are trained without a model; True where a step with such gradients has been before."""
    again = False
    for own in UserOptimizer.deployed():
        steps = steps_of(own.optimizer)
        for param in touched.intersection(map(id, own.everywhere())):
            again |= _trained.setdefault(param, steps) < steps
    return again


def _is_hooked(param: Tensor) -> bool:
    return any(hook is not _note_touched for hooks in tensor_hooks(param) for hook in (hooks or {}).values())


def _refuse(everyone: Sequence[_Told]) -> None:
    """Raises of gradients that no mean over ranks makes right."""
    if any(told.several_shares for told in everyone):
        raise RaNNCError(
            "parameters beside models get gradients in a backward that comes by several calls of models, or by none "
            "after several, in which a rank had different shares of the batch: they belong to one share or the other. "
            "Call backward() for each loss by itself, right after its call, or bring as many rows to each call"
        )
    if any(told.unknown_rows for told in everyone) and any(told.uneven for told in everyone):
        raise RaNNCError(
            "parameters beside the model, in its optimizer, are trained a second time since ranks brought different "
            "numbers of rows to a call of a model, and nobody knows how many this loss is of: call a model for the "
            "rows of each such step, let ranks bring as many rows as each other, or wrap the layers as a model of "
            "their own"
        )
    if any(told.behind_in_ddp for told in everyone) and any(told.uneven for told in everyone):
        raise RaNNCError(
            "layers in DistributedDataParallel behind a model, in its optimizer, get the plain mean of the ranks' "
            "gradients, though ranks bring different numbers of rows: leave DistributedDataParallel out, their "
            "gradients are averaged by rows then"
        )
    if any(told.hooked for told in everyone):
        raise RaNNCError(
            "a parameter beside the model, in its optimizer, has a hook on its gradient, which gets that of one rank's "
            "rows, before ranks average it: do it to .grad after loss.backward(), or put the layer into the model"
        )


def _judge_overflow(store: ParamStore, optimizer: UserOptimizer | None, scale: Tensor | None) -> None:
    """Lets what unscales gradients know of those of all ranks. All ranks call it."""
    if optimizer is None:
        listed = torch.zeros(len(store.used), device=process.own_device(), dtype=torch.float32)
    else:
        listed = optimizer.listed_of(store.used.values())
    kinds, listed_somewhere = store.overflow.share(store.used_here, listed)
    with DisableTorchFunctionSubclass():
        trained = {id(param): place for place, param in enumerate(store.used.values()) if param.requires_grad}
    tell_of_overflow(store, kinds, trained)
    if optimizer is not None and not optimizer.meets_others():
        _spoil_own(optimizer, (kinds.any(0) & listed_somewhere & (listed == 0)).any(), scale)


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
