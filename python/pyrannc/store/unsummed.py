"""Gradients that ranks have not summed: a scaler would judge this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, pytree
from pyrannc.store.home import Guarded
from pyrannc.store.unscale import UNSCALE, refuse_scaler


class Unsummed(Tensor):
    """A gradient, or what was made of one, like any other, which it shares the memory of, but for a scaler.

    Attributes:
        plain: the other.
    """

    plain: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == UNSCALE:
            refuse_scaler()
        if any(issubclass(kind, Guarded) for kind in types):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            # A script may assign what it computes of a gradient in its place.
            shapes = {item.shape for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, Unsummed)}
            return pytree.tree_map(lambda item: _marked(item) if _may_replace(item, shapes) else item, made)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types for it
        return repr(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # likewise

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.plain.__deepcopy__(memo)  # type: ignore[no-untyped-call]  # likewise
        return copied


def _may_replace(item: Any, shapes: Set[torch.Size]) -> bool:
    return type(item) is Tensor and item.shape in shapes and item.is_floating_point()


def _marked(plain: Tensor) -> Unsummed:
    marked = plain.as_subclass(Unsummed)
    marked.plain = plain
    return marked


def mark_unsummed(params: Iterable[Tensor]) -> None:
    """Has scalers refuse the gradients of parameters."""
    with DisableTorchFunctionSubclass():
        for param in params:
            grad = param.grad
            if type(grad) is Tensor:
                param.grad = _marked(grad)


def mark_summed(params: Iterable[Tensor]) -> None:
    """Takes the marks off."""
    with DisableTorchFunctionSubclass():
        for param in params:
            if isinstance(param.grad, Unsummed):
                param.grad = param.grad.plain
