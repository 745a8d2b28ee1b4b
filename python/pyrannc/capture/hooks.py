"""Hooks on modules: they run while the model is captured, and never again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from pyrannc.errors import CaptureError

from .torch_internals import has_backward_hooks, hooks_of_all_calls, hooks_of_calls, version

_Hooks = dict[int, Callable[..., Any]]
_DEPTH = 4
_ITEMS = 64


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that no capture can keep: those on all modules, and on backward.

    Those of torch, such as ``torch.nn.utils.weight_norm``, compute parameters and are captured as part of the forward.
    """
    for hook in (hook for hooks in hooks_of_all_calls() for hook in hooks.values()):
        if not _is_of_torch(hook):
            raise CaptureError(f"the hook {_name(hook)} on the calls of all modules {_ADVICE}")
    for path, module in model.named_modules():
        if has_backward_hooks(module):
            raise CaptureError(
                f"{_where(path)} has a module backward hook, which a captured graph cannot keep; "
                "use Tensor.register_hook in its forward"
            )


def refuse_new_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that came or went after the capture, unless all that are there are torch's."""
    refuse_hooks(model)
    for path, hooks in _own_hooks(model):
        for hook in hooks.values():
            raise CaptureError(
                f"the forward hooks of {_where(path)} have changed since the model was captured ({_name(hook)} and "
                f"{len(hooks) - 1} more are there now), so they would never run; register hooks before the first call, "
                "or call undeploy() first"
            )


@contextmanager
def watched_hooks(model: nn.Module) -> Iterator[None]:
    """Raises CaptureError at the end for a forward hook that does more than change what a module takes or returns.

    What it returns is captured; what it keeps would be kept once, from tensors without data.
    """
    own = list(_own_hooks(model))
    used: dict[int, bool] = {}
    before = {id(hook): _state(hook) for _, hooks in own for hook in hooks.values()}
    kept = [(hooks, dict(hooks)) for _, hooks in own]
    for hooks, originals in kept:
        for key, hook in originals.items():
            if id(hook) in before and not _is_of_torch(hook):
                hooks[key] = _noting(hook, used)
    try:
        yield
    finally:
        for hooks, originals in kept:
            hooks.update(originals)
    for path, hooks in own:
        for hook in hooks.values():
            if not used.get(id(hook), True) or _state(hook) != before[id(hook)]:
                raise CaptureError(f"the forward hook {_name(hook)} of {_where(path)} {_ADVICE}")


def _noting(hook: Callable[..., Any], used: dict[int, bool]) -> Callable[..., Any]:
    """The hook; ``used`` tells whether it has ever returned anything."""

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = hook(*args, **kwargs)
        used[id(hook)] = used.get(id(hook), False) or returned is not None
        return returned

    return call


def _own_hooks(model: nn.Module) -> Iterator[tuple[str, _Hooks]]:
    """Sub-modules with hooks that are not torch's."""
    for path, module in model.named_modules():
        for hooks in hooks_of_calls(module):
            if any(not _is_of_torch(hook) for hook in hooks.values()):
                yield path, hooks


def _state(value: Any, depth: int = 0) -> Any:
    """What a hook can reach, in a form that differs once it has kept something there."""
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else version(value)
    if depth == _DEPTH or isinstance(value, (nn.Module, type, ModuleType)):
        return id(value)
    if isinstance(value, Mapping):
        return id(value), len(value), tuple(_state(item, depth + 1) for item in [*value.values()][:_ITEMS])
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), len(value), tuple(_state(item, depth + 1) for item in [*value][:_ITEMS])
    # A bound method is a new object each time.
    key = 0 if isinstance(value, MethodType) else id(value)
    return key, tuple(_state(item, depth + 1) for item in _reachable(value))


def _reachable(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        found = [value.__globals__[name] for name in names]
        return [*cells, *(value.__defaults__ or ()), *found]
    own = getattr(value, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else [getattr(value, "__self__", None)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _where(path: str) -> str:
    return f"sub-module '{path}'" if path else "the model"


_ADVICE = (
    "keeps something, or does something else than to return what the module then takes or gives: it would run once, on "
    "tensors without data, while the model is captured, and never again; remove it before the call, and return what it "
    "looks at from the model's forward, or compute what it changes there"
)


def _is_of_torch(hook: Callable[..., Any]) -> bool:
    return _defined_in(hook).partition(".")[0] == "torch"


def _defined_in(hook: Any) -> str:
    """The Python module of the code that runs."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    if not hasattr(hook, "__code__"):
        # Of an object, its class says where the method stands that runs.
        hook = next((vars(kind)["__call__"] for kind in type(hook).__mro__ if "__call__" in vars(kind)), hook)
    return str(getattr(hook, "__module__", ""))


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
