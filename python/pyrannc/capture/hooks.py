"""Hooks on modules, which would run while the model is captured and never again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from pyrannc.errors import CaptureError

from .torch_internals import has_backward_hooks, hooks_of_all_calls, hooks_of_calls


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks on sub-modules that are not torch's own.

    Those of torch, such as ``torch.nn.utils.weight_norm``, compute parameters and are captured as part of the forward.
    """
    for hook in (hook for hooks in hooks_of_all_calls() for hook in hooks.values()):
        if not _is_of_torch(hook):
            raise CaptureError(f"the hook {_name(hook)} on the calls of all modules {_ADVICE}")
    for path, module in model.named_modules():
        where = f"sub-module '{path}'" if path else "the model"
        if has_backward_hooks(module):
            raise CaptureError(
                f"{where} has a module backward hook, which a captured graph cannot keep; "
                "use Tensor.register_hook in its forward"
            )
        for hook in (hook for hooks in hooks_of_calls(module) for hook in hooks.values()):
            if not _is_of_torch(hook):
                raise CaptureError(f"the forward hook {_name(hook)} of {where} {_ADVICE}")


_ADVICE = (
    "would run once, on tensors without data, while the model is captured, and never again; remove it before the call, "
    "and return what it looks at from the model's forward, or compute what it changes there"
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
