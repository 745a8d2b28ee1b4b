"""Functions of ``torch.distributed`` refuse to send what not all ranks have, of which most ask nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import FrameType
from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.patching import CHECKS_OF_SENT, GROUP_METHODS, PatchPoint
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.store.held_by_some import held_by_some
from pyrannc.store.home import Guarded, Home

_DISTRIBUTED = CHECKS_OF_SENT[0].owner.__name__
_OF_SENDING = (_DISTRIBUTED, "torch.distributed.c10d_logger")
"""Python modules between a script's call and the checks."""
_OWN = "pyrannc."


def is_sending(func: Any) -> bool:
    """True for a function of ``torch.distributed``."""
    return bool(getattr(func, "__module__", None) == _DISTRIBUTED)


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
        while caller.f_globals.get("__name__", "") in _OF_SENDING and caller.f_back is not None:
            caller = caller.f_back
        if not caller.f_globals.get("__name__", "").startswith(_OWN):
            _refuse_sent(sent if isinstance(sent, (list, tuple)) else [sent], f"dist.{_sender(frame, caller)}()")
        original(sent, *args)

    return check


def _refusing_method(point: PatchPoint) -> Callable[..., Any]:
    original = point.original

    @wraps(original)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller != _DISTRIBUTED and not caller.startswith(_OWN):
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


def _sender(frame: FrameType | None, caller: FrameType) -> str:
    """The function of ``torch.distributed`` that is called, from a frame inside of it."""
    found = ""
    while frame is not None and frame is not caller:
        if frame.f_globals.get("__name__", "") == _DISTRIBUTED:
            name = frame.f_code.co_name
            found = "P2POp" if name.startswith("__") else name
        frame = frame.f_back
    return found
