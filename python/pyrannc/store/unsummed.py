"""Gradients that ranks have not summed: a scaler would judge this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.store.unscale import UNSCALE, refuse_scaler


class Unsummed(Tensor):
    """A gradient like any other, which it shares the memory of, but for a scaler.

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
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch has no types for it
        return repr(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # likewise

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = self.plain.__deepcopy__(memo)  # type: ignore[no-untyped-call]  # likewise
        return copied


def mark_unsummed(params: Iterable[Tensor]) -> None:
    """Has scalers refuse the gradients of parameters."""
    with DisableTorchFunctionSubclass():
        for param in params:
            grad = param.grad
            if type(grad) is Tensor:
                marked = grad.as_subclass(Unsummed)
                marked.plain = grad
                param.grad = marked


def mark_summed(params: Iterable[Tensor]) -> None:
    """Takes the marks off."""
    with DisableTorchFunctionSubclass():
        for param in params:
            if isinstance(param.grad, Unsummed):
                param.grad = param.grad.plain
