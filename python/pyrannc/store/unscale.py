"""What a ``GradScaler`` does to gradients of which some, or all, are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The operator by which it unscales gradients, in place, and finds out whether one is not finite."""


@dataclass(frozen=True)
class _Told:
    overflow: Tensor
    places: dict[int, int]


_told: WeakKeyDictionary[object, _Told] = WeakKeyDictionary()


def tell_of_overflow(model: object, overflow: Tensor, places: dict[int, int]) -> None:
    """Notes whether gradients are not finite on some rank.

    Args:
        model: whose gradients they are; nothing is told any more once it is gone.
        overflow: true where one is not.
        places: of its parameters there that are trained, by ``id``; it is kept.
    """
    _told[model] = _Told(overflow, places)


def is_told(param: int) -> bool:
    """True for a parameter, by ``id``, that was trained at the last backward, and whose gradient is still there."""
    return any(param in told.places for told in _told.values())


def forget_overflow(params: Iterable[int]) -> None:
    """Gradients of parameters, by ``id``, have been dropped, or made finite."""
    gone = [*params] if _told else []
    for told in _told.values():
        for param in gone:
            told.places.pop(param, None)


def unscale_own(
    func: Callable[..., Any], own: Sequence[Tensor], spread: Set[int], found: Tensor, scale: Tensor
) -> None:
    """Unscales the gradients of this rank.

    Args:
        func: the operator.
        own: what this rank has of the gradients.
        spread: ``id`` of the parameters of whose gradients other ranks have a part, or all.
        found: becomes 1 where one is not finite, on any rank.
        scale: to multiply them by.
    """
    if own:
        func(list(own), found, scale)
    flags = [
        told.overflow[place].to(found.device)
        for told in _told.values()
        for place in {told.places[param] for param in spread & told.places.keys()}
    ]
    if flags:
        overflow = torch.stack(flags).any()
        found.copy_(torch.maximum(found, overflow.to(found.dtype).reshape(found.shape)))
