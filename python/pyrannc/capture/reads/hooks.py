"""Hooks on modules: they run while the model is captured, and never again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import nn

from pyrannc.capture.torch_internals.modules import has_backward_hooks, hooks_of_all_calls, hooks_of_calls
from pyrannc.capture.user.holdings import Holdings, TooMuchError
from pyrannc.capture.user.source import SourceTracker
from pyrannc.errors import CaptureError

_Hooks = dict[int, Callable[..., Any]]
_NAMED = 3
_COLLECTORS = "transformers.utils.output_capturing"
"""Its hooks hand what sub-modules return to the call of the model that is running, which returns it."""


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that no capture can keep: those on all modules, and on backward.

    Those of torch, such as ``torch.nn.utils.weight_norm``, compute parameters and are captured as part of the forward.
    """
    for hook in (hook for hooks in hooks_of_all_calls() for hook in hooks.values()):
        if not _is_of_the_call(hook):
            raise CaptureError(f"the hook {_name(hook)} on the calls of all modules {_ADVICE}")
    for path, module in model.named_modules():
        if has_backward_hooks(module):
            raise CaptureError(
                f"{_where(path)} has a module backward hook, which a captured graph cannot keep; "
                "use Tensor.register_hook in its forward"
            )


def refuse_new_hooks(model: nn.Module, strangers: Sequence[nn.Module]) -> None:
    """Raises CaptureError for hooks that came or went after the capture, unless all that are there are torch's.

    Args:
        model: the user's.
        strangers: other modules that it calls.
    """
    refuse_hooks(model)
    for module in strangers:
        _refuse_hooks_of_stranger(module)
    for path, hooks in _own_hooks(model):
        for hook in hooks.values():
            raise CaptureError(
                f"the forward hooks of {_where(path)} have changed since the model was captured ({_name(hook)} and "
                f"{len(hooks) - 1} more are there now), so they would never run; register hooks before the first call, "
                "or call undeploy() first"
            )


@contextmanager
def nothing_collected() -> Iterator[None]:
    """What runs here and is not captured hands nothing to the call that is; it may have calls that collect in it."""
    collector: Any = getattr(sys.modules.get(_COLLECTORS), "_active_collector", None)
    if not hasattr(collector, "context_var"):
        yield
        return
    before, token = (collector.compiling, collector.global_var), collector.context_var.set(None)
    collector.compiling = False
    try:
        yield
    finally:
        collector.context_var.reset(token)
        collector.compiling, collector.global_var = before


@contextmanager
def watched_hooks(model: nn.Module, tracker: SourceTracker) -> Iterator[None]:
    """Raises CaptureError at the end for a forward hook that does more than change what a module takes or returns.

    What it returns is captured; what it keeps would be kept once, from tensors without data.
    """
    own = [(path, hooks) for path, module in model.named_modules() for hooks in hooks_of_calls(module) if hooks]
    hooks_here = [(path, hook) for path, hooks in own for hook in hooks.values() if not _is_of_the_call(hook)]
    watched = frozenset(map(id, model.modules()))
    used: dict[int, bool] = {}
    before = _holdings(hooks_here, watched)
    kept = [(hooks, dict(hooks)) for _, hooks in own]
    for hooks, originals in kept:
        for key, hook in originals.items():
            if not _is_of_the_call(hook):
                hooks[key] = _noting(hook, used)

    def look(module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if id(module) not in watched:
            _refuse_hooks_of_stranger(module)

    tracker.before_calls.append(look)
    try:
        yield
    finally:
        tracker.before_calls.remove(look)
        for hooks, originals in kept:
            hooks.update(originals)
    after = _holdings(hooks_here, watched)
    for (path, hook), was, now in zip(hooks_here, before.of, after.of, strict=True):
        is_lost = not used.get(id(hook), True) and not _asks_for_gradients(hook)
        if is_lost or was != now:
            raise CaptureError(f"the forward hook {_name(hook)} of {_where(path)} {_ADVICE}")


def _holdings(hooks: Sequence[tuple[str, Callable[..., Any]]], watched: Set[int]) -> Holdings:
    try:
        return Holdings([hook for _, hook in hooks], watched)
    except TooMuchError:
        named = ", ".join(f"{_name(hook)} of {_where(path)}" for path, hook in hooks[:_NAMED])
        raise CaptureError(
            f"the forward hooks of the model ({named}) reach too many objects to see whether they keep something "
            "there, which would happen once, while the model is captured, and never again; remove them, or let them "
            "refer to less"
        ) from None


def _refuse_hooks_of_stranger(module: nn.Module) -> None:
    """Raises CaptureError for hooks of a module that the model calls and does not have as a sub-module."""
    for hook in (hook for hooks in hooks_of_calls(module) for hook in hooks.values() if not _is_of_the_call(hook)):
        raise CaptureError(
            f"the hook {_name(hook)} is on a {type(module).__name__} that is no sub-module of the model, so it would "
            "run while the model is captured and never again; make that module an attribute of the model or of one of "
            "its sub-modules (in a list: nn.ModuleList), or remove the hook"
        )


def _noting(hook: Callable[..., Any], used: dict[int, bool]) -> Callable[..., Any]:
    """The hook; ``used`` tells whether it has ever returned anything."""

    def call(*args: Any, **kwargs: Any) -> Any:
        returned = hook(*args, **kwargs)
        used[id(hook)] = used.get(id(hook), False) or returned is not None
        return returned

    return call


def _own_hooks(model: nn.Module) -> Iterator[tuple[str, _Hooks]]:
    """Sub-modules with hooks that no capture has as part of the forward."""
    for path, module in model.named_modules():
        for hooks in hooks_of_calls(module):
            if any(not _is_of_the_call(hook) for hook in hooks.values()):
                yield path, hooks


def _where(path: str) -> str:
    return f"sub-module '{path}'" if path else "the model"


_ADVICE = (
    "keeps something, or does something else than to return what the module then takes or gives: it would run once, on "
    "tensors without data, while the model is captured, and never again; remove it before the call, and return what it "
    "looks at from the model's forward, or compute what it changes there"
)


def _is_of_the_call(hook: Callable[..., Any]) -> bool:
    """True for those that are captured as part of the forward."""
    where = _defined_in(hook)
    return where == _COLLECTORS or where.partition(".")[0] == "torch"


def _asks_for_gradients(hook: Callable[..., Any]) -> bool:
    """True for one that calls ``requires_grad_`` and nothing else, as for checkpoints behind frozen embeddings.

    What a captured graph computes again has no need of it.
    """
    code = getattr(hook, "__code__", None)
    return code is not None and set(code.co_names) == {"requires_grad_"} and not code.co_freevars


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
