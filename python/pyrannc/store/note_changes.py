"""Takes note of what a script does to gradients that other ranks hold, a part or all: it may make them finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, pytree
from pyrannc.store.home import Guarded
from pyrannc.store.unscale import changes_of, forget_overflow


def note_dropped(args: Sequence[Any]) -> None:
    """What a script assigns to a parameter's gradient may be nothing, or another than stands for it."""
    param = args[0]
    if len(args) == 1 or args[1] is None:
        forget_overflow([param.home.param])
        return
    with DisableTorchFunctionSubclass():
        stays = args[1] is vars(param).get("_gradient", param.grad)
    if not stays:
        _note_replaced(param, param.home.param)


def note_replaced(grads: Iterable[object]) -> None:
    """Takes note of what a script has computed of gradients, where it stands in their place."""
    for grad in grads:
        if isinstance(grad, Guarded) and grad.home.covers != "all":
            _note_replaced(grad, grad.home.param)


def _note_replaced(like: Any, param: int) -> None:
    with DisableTorchFunctionSubclass():
        found = changes_of(param, like.dtype)
    for changes in found:
        changes.add_to_some("grad = ...")


def note_changed(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Takes note of what is done to gradients in place: it may make them finite, or otherwise."""
    is_list = isinstance(args[0], (list, tuple))
    for place, target in enumerate(args[0] if is_list else args[:1]):
        if not isinstance(target, Guarded) or not target.home.covers:
            continue
        with DisableTorchFunctionSubclass():
            found = changes_of(target.home.param, target.dtype)
        for changes in found:
            if any(_is_gradient(leaf) for arg in args[1:] for leaf in pytree.tree_leaves(at(place, arg))):
                changes.joined = name
            if target.home.covers == "all":
                changes.add(func, name, [at(place, arg) for arg in args[1:]] if is_list else args[1:], kwargs)
            else:
                changes.add_to_some(name)


def at(place: int, arg: Any) -> Any:
    """Of an argument of a function that works on lists, what belongs to one target, as lists again."""
    return [arg[place]] if isinstance(arg, (list, tuple)) else arg


def _is_gradient(item: object) -> bool:
    """True for a gradient, or numbers made of one; not for a mask."""
    if not isinstance(item, Guarded) or not item.home.is_of_gradient:
        return False
    with DisableTorchFunctionSubclass():
        return item.dtype != torch.bool
