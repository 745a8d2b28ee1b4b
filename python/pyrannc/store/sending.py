"""Functions of ``torch.distributed`` refuse to send what not all ranks have, of which most ask nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.patching import CHECKS_OF_SENT, GROUP_METHODS, PatchPoint
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.distributed_calls import C10D, LOGGER, called_function
from pyrannc.capture.user.source import module_of
from pyrannc.store.held_by_some import held_by_some
from pyrannc.store.home import Guarded, Home

_OWN = "pyrannc."


def is_sending(func: Any) -> bool:
    """True for a function of ``torch.distributed``."""
    return bool(getattr(func, "__module__", None) == C10D)


@cache
def watch_sending() -> None:
    """From now on, functions of ``torch.distributed`` and methods of groups do."""
    for point in CHECKS_OF_SENT:
        setattr(point.owner, point.name, _refusing_function(point))
    for point in GROUP_METHODS:
        setattr(point.owner, point.name, _refusing_method(point))


def _refusing_function(point: PatchPoint) -> Callable[..., None]:
    original = point.original

    def check(sent: Any, *args: Any) -> None:
        frame = caller = sys._getframe(1)
        while module_of(caller) in (C10D, LOGGER) and caller.f_back is not None:
            caller = caller.f_back
        if not module_of(caller).startswith(_OWN):
            name = called_function(frame, caller).removeprefix("torch.distributed.")
            _refuse_sent(sent if isinstance(sent, (list, tuple)) else [sent], f"dist.{name}()")
        original(sent, *args)

    return check


def _refusing_method(point: PatchPoint) -> Callable[..., Any]:
    original = point.original

    @wraps(original)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        caller = module_of(sys._getframe(1))
        if caller != C10D and not caller.startswith(_OWN):
            _refuse_sent(pytree.tree_leaves((args, kwargs)), f"group.{point.name}()")
        return original(group, *args, **kwargs)

    return method


def _refuse_sent(sent: Iterable[object], call: str) -> None:
    for tensor in sent:
        if isinstance(tensor, Guarded):
            tensor.home.refuse_sending(call)
        held = held_by_some(tensor) if isinstance(tensor, Tensor) else None
        if isinstance(tensor, Tensor) and held is not None:
            kind = "the gradient of parameter" if held.is_gradient else "parameter or buffer"
            Home(kind, held.name, held.ranks, tensor.device, tensor.stride()).refuse_sending(call)
