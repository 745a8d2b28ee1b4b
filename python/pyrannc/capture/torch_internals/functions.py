"""Calls of custom ``autograd.Function``s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any

from torch.autograd.function import Function

from .patching import PatchPoint

_Apply = Callable[..., Any]
_Bypassed = Callable[[type[Function], Sequence[Any]], None]


def functions_applied_by(apply: _Apply, bypassed: _Bypassed = lambda *_: None) -> AbstractContextManager[None]:
    """While active, ``apply(original, function, ...)`` runs for ``function.apply(...)``: custom ones stay whole.

    Scripts have names of their own for that method, bound to a function. Public: ``torch.compiler.allow_in_graph``, for
    export and compile only.

    Args:
        bypassed: is given a function, and what its forward gets, that is called by such a name where torch has the
            method in C, as 2.15 does, and nothing can stand in for it.
    """
    return _code_gives_way(_METHOD.__func__, apply) if isinstance(_METHOD, classmethod) else _class_has(apply, bypassed)


_METHOD = vars(Function)["apply"]


def _code_for_apply() -> CodeType:
    """It has one variable from outside, as that of torch has."""
    every = Function

    def apply(cls: type[Function], /, *args: Any, rannc: _Apply, **kwargs: Any) -> Any:
        assert issubclass(cls, every)
        return rannc(cls, *args, **kwargs)

    return apply.__code__


_CODE_FOR_APPLY = _code_for_apply()


@contextmanager
def _code_gives_way(method: Any, apply: _Apply) -> Iterator[None]:
    code, defaults = method.__code__, method.__kwdefaults__
    original = FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    original.__kwdefaults__ = defaults
    # Other threads may call it meanwhile.
    method.__kwdefaults__ = {**(defaults or {}), "rannc": partial(apply, original)}
    method.__code__ = _CODE_FOR_APPLY
    try:
        yield
    finally:
        method.__code__ = code
        method.__kwdefaults__ = defaults


@contextmanager
def _class_has(apply: _Apply, bypassed: _Bypassed) -> Iterator[None]:
    method = vars(Function)["apply"]
    running: list[type[Function]] = []

    def original(cls: type[Function], /, *args: Any, **kwargs: Any) -> Any:
        running.append(cls)
        try:
            return method.__get__(None, cls)(*args, **kwargs)
        finally:
            running.pop()

    def applied(cls: type[Function], /, *args: Any, **kwargs: Any) -> Any:
        return apply(original, cls, *args, **kwargs)

    def watched(cls: type[Function], forward: Any) -> Any:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not running:
                bypassed(cls, args)
            return forward(*args, **kwargs)

        return staticmethod(call)

    with ExitStack() as stack:
        for cls in [cls for cls in _all_functions(Function) if isinstance(vars(cls).get("forward"), staticmethod)]:
            point = PatchPoint(cls, "forward")
            stack.enter_context(point.replaced_by(watched(cls, point.original.__func__)))
        stack.enter_context(PatchPoint(Function, "apply").replaced_by(classmethod(applied)))
        yield


def _all_functions(of: type[Function]) -> set[type[Function]]:
    return {sub for cls in of.__subclasses__() for sub in (cls, *_all_functions(cls))}
