"""What a captured call took for granted of the model's Python side, checked before each further call."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from pyrannc.call.kept_values import NUMBERS, Types, kept
from pyrannc.call.watched import Holder, Watched
from pyrannc.capture import PythonState
from pyrannc.capture.reads.global_reads import GlobalReads
from pyrannc.capture.reads.hooks import refuse_new_hooks
from pyrannc.capture.torch_internals.modules import hooks_of_all_calls, hooks_of_calls, own_modules
from pyrannc.capture.torch_internals.tensors import version
from pyrannc.capture.user.kinds import is_of


class ModuleGuards:
    """Attributes that a captured call has read, sub-modules and hooks, as they were then.

    Comparing all of them takes one pass in C for each sub-module that has any.

    Args:
        model: right after the capture.
        state: what the call has read.
    """

    def __init__(self, model: nn.Module, state: PythonState) -> None:
        self._model = model
        watched = Watched()
        for attribute in state.read:
            watched.add_read(attribute.module, attribute.name)
        for module in state.strangers:
            watched.add_stranger(module)
        watched.look_into_values()
        for held, name in (*state.globals, *GlobalReads({}, watched.functions, watched.helpers)):
            watched.add_global(held, name)
        self._objects = watched.objects
        self._sizes = list(map(len, self._objects))
        # Of one name, what looks names up gives no tuple.
        self._names = [(holder, sorted(names) * (1 + (len(names) == 1))) for holder, names in watched.names.values()]
        self._getters: list[tuple[Callable[[Holder], Any], Holder]] = [
            (itemgetter(*names), holder) for holder, names in self._names
        ]
        found = [get(holder) for get, holder in self._getters]
        self._values = [tuple(map(kept, values)) for values in found]
        self._types = Types(found)
        self._tensors = [(holder, name, tensor, version(tensor)) for holder, name, tensor in watched.tensors]
        self._absent = watched.absent
        self._owners = [holder for holder, _ in watched.absent.values()]
        self._lengths = list(map(len, self._owners))
        families = [own_modules(module) for module in model.modules()]
        self._childless = [family for family in families if not family]
        self._families = [family for family in families if family]
        self._children = [list(family.values()) for family in self._families]
        self._child_names = list(map(list, self._families))
        self._strangers = state.strangers
        self._grad_mode = state.grad_mode
        called = [*model.modules(), *state.strangers]
        hooks = [*hooks_of_all_calls(), *(hooks for module in called for hooks in hooks_of_calls(module))]
        self._hookless = [found for found in hooks if not found]
        self._hooked = [found for found in hooks if found]
        self._hook_keys = list(map(list, self._hooked))

    def hold(self) -> bool:
        """True when the captured call is still what the model would do.

        Raises:
            CaptureError: hooks of sub-modules have come or gone.
        """
        if any(self._hookless) or list(map(list, self._hooked)) != self._hook_keys:
            refuse_new_hooks(self._model, self._strangers)
            return False
        if self._grad_mode is not None and self._grad_mode is not torch.is_grad_enabled():
            return False
        try:
            found = [get(holder) for get, holder in self._getters]
            if found != self._values or not self._types.are_of(found):
                return False
        except Exception:  # an attribute is gone, or something that does not compare, a tensor or an array
            return False
        if any(self._childless) or list(map(list, self._families)) != self._child_names:
            return False
        if [list(family.values()) for family in self._families] != self._children:
            return False
        if list(map(len, self._objects)) != self._sizes:
            return False
        if list(map(len, self._owners)) != self._lengths and not self._still_absent():
            return False
        return all(
            holder.get(name) is tensor and version(tensor) == seen for holder, name, tensor, seen in self._tensors
        )

    def _still_absent(self) -> bool:
        if any(name in holder for holder, names in self._absent.values() for name in names):
            return False
        self._lengths = list(map(len, self._owners))
        return True

    def changed(self) -> str | None:
        """What is not as it was, if that has a name."""
        if self._grad_mode is not None and self._grad_mode is not torch.is_grad_enabled():
            return "the answer to torch.is_grad_enabled()"
        for (holder, names), values in zip(self._names, self._values, strict=True):
            for name, old in zip(names, values, strict=True):
                now = holder.get(name)
                try:
                    same = bool(now is old or now == old) and (not is_of(old, NUMBERS) or type(now) is type(old))
                except Exception:  # as in hold()
                    same = False
                if not same:
                    return f'"{name}" was {_short(old)} and is {_short(now)}'
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
