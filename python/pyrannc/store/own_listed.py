"""An optimizer lists the parameters of all ranks, and works with this rank's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pyrannc.store.elsewhere import is_elsewhere

_KEYS = ("params", "param_names")
_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_hidden: WeakKeyDictionary[Optimizer, list[tuple[dict[str, Any], dict[str, Any], list[Any]]]] = WeakKeyDictionary()


@contextmanager
def own_listed(optimizer: Optimizer) -> Iterator[None]:
    """Lists only what this rank holds, inside."""
    if optimizer in _hidden:
        yield
        return
    _hide(optimizer)
    try:
        yield
    finally:
        _show(optimizer)


def step_with_own(optimizer: Optimizer) -> None:
    """From now on steps work with what this rank holds."""
    if optimizer not in _hooks:
        _hooks[optimizer] = optimizer.register_step_pre_hook(_before)
        optimizer.register_step_post_hook(_after)


def hide_last(optimizer: Optimizer) -> None:
    """Lets the script's own hooks, which run before a step that begins, find all parameters."""
    if optimizer in _hooks:
        _hooks[optimizer].remove()
        _hooks[optimizer] = optimizer.register_step_pre_hook(_before)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A step that failed has left it so.
    _show(optimizer)
    _hide(optimizer)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _show(optimizer)


def _hide(optimizer: Optimizer) -> None:
    hidden = []
    for group in optimizer.param_groups:
        kept = [place for place, param in enumerate(group["params"]) if not is_elsewhere(param)]
        if len(kept) < len(group["params"]):
            all_of_them = {key: group[key] for key in _KEYS if key in group}
            group.update({key: [listed[place] for place in kept] for key, listed in all_of_them.items()})
            hidden.append((group, all_of_them, group["params"]))
    _hidden[optimizer] = hidden


def _show(optimizer: Optimizer) -> None:
    for group, all_of_them, own in _hidden.pop(optimizer, []):
        # Otherwise it was the script's will to list others.
        if group["params"] is own:
            group.update(all_of_them)
