"""Whether a hook of gradients in a forward may get those of parts of the batch, one part after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.nodes.bounds import within_bounds
from pyrannc.capture.nodes.chance import other_generators_restored, torch_draws
from pyrannc.capture.nodes.dims import Dim

Hook = Callable[[Tensor], Any]

_DECADES = 4.0
"""Gradients are made up between 10 to the power of minus this and of this, for hooks that begin at some size."""
_FAR = 0.01
"""Of the largest element: what is rounded differently is nearer, in narrow types too."""


def takes_parts(hook: Hook, gradient: Tensor, extents: Sequence[Dim | None], device: torch.device) -> bool:
    """Tries a hook with made-up gradients.

    Of what has rows, each part of the batch gives the gradients of its own; of what has none, such as what is made of
    parameters alone, it gives a part of their sum.

    Args:
        gradient: one without data.
        extents: of its dimensions.
        device: where the hook will run.

    Returns:
        True, too, for what draws random numbers, or cannot be tried.
    """
    with_rows = [place for place, extent in enumerate(extents) if extent is None or extent.per_row]
    if None in extents or len(with_rows) > 1:
        return True
    try:
        with torch.no_grad(), redirect_stdout(StringIO()), other_generators_restored(), within_bounds():
            if not with_rows:
                return _adds_up(hook, [_made_up(gradient, extents, 1, device, seed) for seed in range(2)])
            parts = [_made_up(gradient, extents, 2, device, seed) for seed in range(2)]
            return _joins(hook, parts, with_rows[0])
    except Exception:  # whatever the user's code raises for made-up gradients
        return True


def _adds_up(hook: Hook, parts: Sequence[Tensor]) -> bool:
    first, second = (_passed(hook, part) for part in parts)
    return _gives(hook, parts[0] + parts[1], first + second)


def _joins(hook: Hook, parts: Sequence[Tensor], dim: int) -> bool:
    return _gives(hook, torch.cat(list(parts), dim), torch.cat([_passed(hook, part) for part in parts], dim))


def _gives(hook: Hook, whole: Tensor, expected: Tensor) -> bool:
    found, again = _passed(hook, whole), _passed(hook, whole, seed=1)
    return not torch.equal(found, again) or _is_near(found, expected)


def _passed(hook: Hook, gradient: Tensor, seed: int = 0) -> Tensor:
    """What a hook makes of a gradient, which it may change in place."""
    given = gradient.clone()
    with torch_draws(seed, gradient.device):
        made = hook(given)
    return made if isinstance(made, Tensor) else given


def _is_near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not found.numel():
        return True
    largest = torch.maximum(found.abs().max(), expected.abs().max())
    return bool((found - expected).abs().max() <= _FAR * largest)


def _made_up(like: Tensor, extents: Sequence[Dim | None], rows: int, device: torch.device, seed: int) -> Tensor:
    shape = [extent.at(rows) for extent in extents if extent is not None]
    with torch_draws(seed, device):
        sizes = 10 ** (torch.rand(shape, device=device) * 2 * _DECADES - _DECADES)
        return (torch.randn(shape, device=device) * sizes).to(like.dtype)
