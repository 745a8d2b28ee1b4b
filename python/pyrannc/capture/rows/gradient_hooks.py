"""Whether a hook of gradients in a forward may get those of parts of the batch, one part after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import NamedTuple

import torch
from torch import Tensor

from pyrannc.capture.nodes.bounds import within_bounds
from pyrannc.capture.nodes.chance import other_generators_restored, torch_draws
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.untraced_backwards import Hook

from .trial import RELATIVE

_SIZES = (1.0, 1e-3, 0.03, 30.0)
"""Of made-up gradients, for hooks that begin at some size, add something, or raise an error for others."""
_ROUNDED = RELATIVE | {torch.bfloat16: 3e-2}
"""By how much of the largest element those of parts may differ: hooks round less often than whole sub-modules."""
_ROUNDED_SUM = 0.02
"""Likewise of sums, which some hooks round to narrow types."""
_MOST_ELEMENTS = 1 << 24
"""Of a made-up gradient; larger ones get shorter dimensions."""


def takes_parts(hook: Hook, gradient: Tensor, extents: Sequence[Dim | None], device: torch.device) -> bool:
    """Tries a hook with made-up gradients of several sizes.

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
    of_part = [extent.at(2) for extent in extents if extent is not None]
    rows = with_rows[0] if with_rows else None
    return all(_takes_parts(hook, _Form(_bounded(of_part, rows), gradient.dtype, device, rows), s) for s in _SIZES)


class _Form(NamedTuple):
    """Of the gradients of a part; ``rows``: the dimension that has them."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    rows: int | None


def _bounded(shape: Sequence[int], rows: int | None) -> Sequence[int]:
    if math.prod(shape) <= _MOST_ELEMENTS:
        return shape
    return [extent if place == rows else min(extent, 256) for place, extent in enumerate(shape)]


def _takes_parts(hook: Hook, form: _Form, size: float) -> bool:
    try:
        with torch.no_grad(), redirect_stdout(StringIO()), other_generators_restored(), within_bounds():
            return _agrees(hook, form, size)
    except Exception:  # whatever the user's code raises for made-up gradients
        return True


def _agrees(hook: Hook, form: _Form, size: float) -> bool:
    parts = [_made_up(form, size, seed) for seed in range(2)]
    passed = [_passed(hook, part) for part in parts]
    if form.rows is None:
        whole, expected, rounded = parts[0] + parts[1], passed[0] + passed[1], _ROUNDED_SUM
    else:
        whole, expected = torch.cat(parts, form.rows), torch.cat(passed, form.rows)
        rounded = _ROUNDED.get(form.dtype, _ROUNDED_SUM)
    found, again = _passed(hook, whole).nan_to_num(), _passed(hook, whole, seed=1).nan_to_num()
    return not torch.equal(found, again) or _is_near(found, expected.nan_to_num(), rounded)


def _passed(hook: Hook, gradient: Tensor, seed: int = 0) -> Tensor:
    """What a hook makes of a gradient, which it may change in place."""
    given = gradient.clone()
    with torch_draws(seed, gradient.device):
        made = hook(given)
    return made if isinstance(made, Tensor) else given


def _is_near(found: Tensor, expected: Tensor, rounded: float) -> bool:
    if found.shape != expected.shape:
        return False
    return not found.numel() or bool((found - expected).abs().max() <= rounded * expected.abs().max())


def _made_up(form: _Form, size: float, seed: int) -> Tensor:
    with torch_draws(seed, form.device):
        return (torch.randn(form.shape, device=form.device) * size).to(form.dtype)
