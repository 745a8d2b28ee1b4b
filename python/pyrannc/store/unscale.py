"""What a ``GradScaler`` does to gradients of which some, or all, are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The operator by which it unscales gradients, in place, and finds out whether one is not finite."""

_told: dict[torch.device, Tensor] = {}


def tell_of_overflow(found: Tensor) -> None:
    """Notes, for a rank without gradients of its own, whether another rank's are not finite.

    Args:
        found: above 0 for each set of gradients some of which are not, and at last where the loss was scaled.
    """
    _told[found.device] = found


def unscale_own(func: Callable[..., Any], own: Sequence[Tensor], found: Tensor, scale: Tensor) -> None:
    """Unscales the gradients of this rank.

    Args:
        func: the operator.
        found: becomes 1 where one is not finite.
        scale: to multiply them by.
    """
    if own:
        func(list(own), found, scale)
    elif (told := _told.pop(found.device, None)) is not None:
        overflow = (told[:-1] > 0).any() & (told[-1] > 0)
        found.copy_(torch.maximum(found, overflow.to(found.dtype).reshape(found.shape)))
