"""What the host raises an error for and a GPU ends the process: wrong indices, and what is no probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.operators import OpOverload, schema
from pyrannc.capture.torch_internals.tensors import BesideCompiler


@contextmanager
def within_bounds() -> Iterator[None]:
    """What operators are given is checked inside, where there may be tensors on a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types for it
        with Bounds():  # type: ignore[no-untyped-call]  # torch has no types for it
            yield
    else:
        yield


class Bounds(BesideCompiler):  # type: ignore[no-untyped-call]  # torch has no types for it
    """While active, an operator raises IndexError or ValueError instead, as on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            names = (argument.name for argument in schema(func).arguments)
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            for numbered in _numbered(func.__name__.partition(".")[0], given):
                numbered.check(func)
            domain = _DOMAINS.get(func.__name__)
            if domain is not None and _has_data(given.get(domain[0])) and not domain[1](given[domain[0]]).all():
                raise ValueError(f"{func} is given what it has no answer for")
        return func(*args, **(kwargs or {}))


def _has_data(item: Any) -> TypeGuard[Tensor]:
    if not isinstance(item, Tensor) or isinstance(item, FakeTensor):
        return False
    return not item.is_meta and not item.is_nested and item.layout == torch.strided


@dataclass(frozen=True)
class _Numbered:
    """Numbers that an operator is given, and of how many elements.

    Attributes:
        from_end: negative ones count from the end.
        ignored: a number that stands for none.
    """

    numbers: Tensor
    count: int
    from_end: bool = False
    ignored: int | None = None

    def check(self, func: Any) -> None:
        """Raises IndexError where one lies outside."""
        if not _has_data(self.numbers):
            return
        numbers = self.numbers if self.ignored is None else self.numbers[self.numbers != self.ignored]
        if numbers.numel() == 0:
            return
        least, most = int(numbers.min()), int(numbers.max())
        if least < (-self.count if self.from_end else 0) or most >= self.count:
            wrong = most if most >= self.count else least
            raise IndexError(f"{func} is given the number {wrong}, where there are {self.count}")


def _numbered(name: str, given: Mapping[str, Any]) -> Iterator[_Numbered]:
    own = given.get("self")
    if name in ("nll_loss_forward", "nll_loss2d_forward") and own is not None:
        yield _Numbered(given["target"], own.shape[min(1, own.dim() - 1)], ignored=given["ignore_index"])
    elif name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only"):
        yield _Numbered(given["indices"], len(given["weight"]))
    elif name in ("take", "put", "put_") and own is not None:
        yield _Numbered(given["index"], own.numel(), from_end=True)
    elif name in ("index", "index_put", "index_put_") and own is not None:
        yield from _by_dimension(own, given["indices"])
    elif name.startswith(("gather", "scatter", "index_")) and own is not None and own.dim() and "index" in given:
        yield _Numbered(given["index"], own.shape[given["dim"]], from_end=name.startswith("index_fill"))
    elif name in ("masked_scatter", "masked_scatter_") and _has_data(own) and _has_data(given["mask"]):
        taken = given["mask"].expand_as(own).sum()
        yield _Numbered(taken[taken > 0] - 1, given["source"].numel())


def _by_dimension(own: Tensor, indices: Sequence[Tensor | None]) -> Iterator[_Numbered]:
    dim = 0
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield _Numbered(index, own.shape[dim], from_end=True)
        dim += index.dim() if is_mask and index is not None else 1


def _are_probabilities(numbers: Tensor) -> Tensor:
    return (numbers >= 0) & (numbers <= 1)


def _are_rates(numbers: Tensor) -> Tensor:
    return numbers >= 0


def _are_weights(numbers: Tensor) -> Tensor:
    return (numbers >= 0) & numbers.isfinite() & (numbers.sum(-1, keepdim=True) > 0)


_DOMAINS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "bernoulli.default": ("self", _are_probabilities),
    "bernoulli.Tensor": ("p", _are_probabilities),
    "bernoulli_.Tensor": ("p", _are_probabilities),
    "binary_cross_entropy.default": ("self", _are_probabilities),
    "multinomial.default": ("self", _are_weights),
    "poisson.default": ("self", _are_rates),
    "_assert_async.default": ("self", Tensor.bool),
    "_assert_async.msg": ("self", Tensor.bool),
    "as_valid.default": ("valid", Tensor.bool),
}
"""By operator, an argument, and where in it an operator can go on."""
