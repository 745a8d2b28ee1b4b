"""What a ``GradScaler`` does to gradients of which some, or all, are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The operator by which it unscales gradients, in place, and finds out whether one is not finite."""


@dataclass(frozen=True)
class _Told:
    found: Tensor
    listed: Callable[[], Set[str]]


_told: dict[torch.device, _Told] = {}


def tell_of_overflow(found: Tensor, listed: Callable[[], Set[str]]) -> None:
    """Notes, for ranks without gradients of an optimizer, whether other ranks' are not finite.

    Args:
        found: of two sets of gradients, above 0 where some are not; then above 0 where the loss was scaled.
        listed: names of the parameters of the first set, on all ranks.
    """
    _told[found.device] = _Told(found, listed)


def unscale_own(
    func: Callable[..., Any], own: Sequence[Tensor], away: Sequence[str], found: Tensor, scale: Tensor
) -> None:
    """Unscales the gradients of this rank.

    Args:
        func: the operator.
        away: names of the parameters whose gradients are on other ranks alone.
        found: becomes 1 where one is not finite.
        scale: to multiply them by.
    """
    if own:
        func(list(own), found, scale)
    elif (told := _told.get(found.device)) is not None:
        listed = told.listed()
        in_first = [name in listed for name in away]
        asked = told.found[0 if any(in_first) else 1 : 1 if all(in_first) else 2]
        overflow = (asked > 0).any() & (told.found[-1] > 0)
        found.copy_(torch.maximum(found, overflow.to(found.dtype).reshape(found.shape)))
