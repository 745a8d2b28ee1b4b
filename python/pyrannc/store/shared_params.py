"""Finds parameters of a deployed model in another one, or in an optimizer that was not given to it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import is_dense
from pyrannc.errors import RaNNCError
from pyrannc.job import agree
from pyrannc.job.garbage import collect_older
from pyrannc.store.after_backward import forget_shares
from pyrannc.store.elsewhere import is_elsewhere
from pyrannc.store.held_by_some import forget_holders, note_holders
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.store import ParamStore

_numbers = itertools.count()


@dataclass(frozen=True)
class _Deployed:
    """A model that is deployed, with what keeps none of it alive.

    Attributes:
        number: equal on all ranks.
        module: the RaNNCModule.
    """

    number: int
    store: weakref.ref[ParamStore]
    optimizer: weakref.ref[UserOptimizer] | None
    module: weakref.ref[nn.Module]


_deployed: list[_Deployed] = []


def take_back_dropped(model: nn.Module) -> None:
    """Takes back what of a model was deployed by RaNNCModules that no rank has any more. All ranks call it."""
    params = set(map(id, model.parameters()))
    everyone: list[set[int]] = agree.gather_objects(_dropped(params))
    if any(found != everyone[0] for found in everyone):
        # Each rank collects garbage at a time of its own.
        collect_older()
        everyone = agree.gather_objects(_dropped(params))
    for number in sorted(set.intersection(*everyone)):
        store = next(known.store() for known in _deployed if known.number == number)
        if store is not None:
            store.bring_back()
            UserOptimizer.widen_all(store)
            note_taken_back(store)


def _dropped(params: set[int]) -> set[int]:
    """Numbers of deployments that have some of these, by ``id``, and whose RaNNCModule is gone."""
    stores = [(known.number, known.store()) for known in _deployed if known.module() is None]
    return {
        number
        for number, store in stores
        if store is not None and not params.isdisjoint(map(id, store.params.values()))
    }


def refuse_deployed(model: nn.Module, optimizer: UserOptimizer | None) -> None:
    """All ranks call it, before a model is deployed.

    Raises:
        RaNNCError: another RaNNCModule has the model, or spreads parameters or buffers of it; the same on all ranks.
    """
    reasons: list[str | None] = agree.gather_objects(_why_not(model, optimizer))
    why = next((reason for reason in reasons if reason is not None), None)
    if why is not None:
        raise RaNNCError(why)


def _why_not(model: nn.Module, optimizer: UserOptimizer | None) -> str | None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    away = next((name for name, tensor in tensors.items() if is_elsewhere(tensor)), None)
    own = set(map(id, model.parameters()))
    known = [(set(map(id, store.params.values())), other) for store, other in _known()]
    sharing = [(params, other) for params, other in known if not own.isdisjoint(params)]
    if away is not None and not sharing:
        return (
            "this model is still spread over the ranks by a RaNNCModule that is gone: build the model anew, and call "
            "undeploy() of a RaNNCModule, on all ranks, before it is dropped"
        )
    if any(params == own and (away or _is_held(own, params, other, optimizer)) for params, other in sharing):
        return (
            "this model is still deployed by an earlier RaNNCModule: call undeploy() of that one, on all ranks, before "
            "the model is wrapped again"
        )
    if away is None:
        return _why_not_apart(dict(model.named_parameters()))
    kind = "parameter" if isinstance(tensors[away], nn.Parameter) else "buffer"
    return (
        f'{kind} "{away}" is spread over the ranks by another RaNNCModule already: wrap one module that holds both '
        "models, and call that"
    )


def _why_not_apart(params: Mapping[str, Tensor]) -> str | None:
    """Why parameters cannot lie on different ranks, or move: two have elements in one place of memory."""
    real = {name: param for name, param in params.items() if _has_own_memory(param)}
    spans = sorted((param.data_ptr(), param.data_ptr() + param.nbytes, name) for name, param in real.items())
    for (_, end, first), (start, _, second) in pairwise(spans):
        if start < end and real[first].device == real[second].device:
            one, other = sorted((first, second), key=list(params).index)
            return (
                f'parameters "{one}" and "{other}" share memory, as after `second.data = first.data`, which '
                "ends where they are moved: make them one parameter before the model is wrapped (second.weight = "
                "first.weight)"
            )
    return None


def _has_own_memory(param: Tensor) -> bool:
    is_plain = type(param) is nn.Parameter and param.layout == torch.strided and not param.is_meta
    return is_plain and param.numel() > 0 and is_dense(param)


def _known() -> list[tuple[ParamStore, UserOptimizer | None]]:
    """Deployed models, each with its optimizer."""
    found = [(known.store(), None if known.optimizer is None else known.optimizer()) for known in _deployed]
    return [(store, other) for store, other in found if store is not None]


def note_deployed(store: ParamStore, optimizer: UserOptimizer | None, module: nn.Module) -> None:
    """A model is deployed, and its optimizer is going to be narrowed.

    Args:
        module: the RaNNCModule.

    Raises:
        RaNNCError: the optimizer of another deployed model lists parameters of this one, or the other way round.
    """
    number, params = next(_numbers), set(map(id, store.params.values()))
    for known, other in _known():
        if _clash(params, other, set(map(id, known.params.values())), optimizer):
            raise RaNNCError(
                "an optimizer that was given to one RaNNCModule lists parameters of another one, which some ranks do "
                "not hold; give it to both: RaNNCModule(first, optimizer) and RaNNCModule(second, optimizer)"
            )
    of_optimizer = None if optimizer is None else weakref.ref(optimizer)
    _deployed.append(_Deployed(number, weakref.ref(store), of_optimizer, weakref.ref(module)))
    note_holders(store)


def note_taken_back(store: ParamStore) -> None:
    """A model is deployed no longer."""
    _deployed[:] = [known for known in _deployed if known.store() not in (None, store)]
    forget_shares(store)
    forget_holders(store)


def _is_held(own: set[int], params: set[int], other: UserOptimizer | None, optimizer: UserOptimizer | None) -> bool:
    """True where a model cannot be deployed once more: ranks divide its optimizer's state, or that is another."""
    return _clash(own, other, params, optimizer) or (other is not None and other.divides_state)


def _clash(params: set[int], other: UserOptimizer | None, known: set[int], optimizer: UserOptimizer | None) -> bool:
    """True where the optimizer of one of two models lists parameters of the other one, which has another optimizer.

    Args:
        params: ``id`` of those of a model that is going to be deployed with ``optimizer``.
        other: optimizer of a deployed model.
        known: ``id`` of its parameters.
    """
    if other is optimizer:
        return False
    listed = [] if other is None else other.everywhere()
    return _meet(params, listed) or _meet(known, [] if optimizer is None else optimizer.all())


def _meet(params: set[int], listed: Iterable[Tensor]) -> bool:
    return any(id(param) in params for param in listed)
