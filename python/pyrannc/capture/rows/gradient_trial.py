"""Whether gradients may pass through a hook, or through a backward of the user, in the parts that they come in.

Of what has rows, a part of the batch gives the gradients of its rows; of what has none, it gives a part of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.nodes.chance import torch_draws
from pyrannc.capture.nodes.leaf import GradientHook
from pyrannc.capture.torch_internals.levels import regions_ended
from pyrannc.capture.torch_internals.tensors import pytree

from .trial import Operand, ends_a_gpu, rows_shown

_DECADES = (-2.0, 2.0)
"""Sizes of the gradients that are tried, for what begins at one of them."""
_FAR = 0.1
"""Of the largest element: roundings are smaller, those to narrow types inside of a call too."""


def rows_shown_through(hook: GradientHook, operand: Operand, device: torch.device, rows: int) -> int:
    """Of how many rows, at most, a hook may get the gradients in parts, as :func:`rows_shown`; 0: of none."""
    tensor, extents, stays = operand
    dim = next((place for place, extent in enumerate(extents) if extent is None or extent.per_row), None)
    if dim is None:
        return rows if may_add_up(hook.passed, [operand], device) else 0
    first = [extents[dim], *extents[:dim], *extents[dim + 1 :]]

    def passed(given: Tensor) -> Tensor:
        return hook.passed(given.movedim(0, dim)).movedim(dim, 0)

    return rows_shown(passed, [(tensor, first, stays)], device, rows)


def may_add_up(call: Callable[..., Any], operands: Sequence[Any], device: torch.device) -> bool | None:
    """Whether gradients of two parts of a sum are those of the sum, for a call that takes nothing with rows.

    Args:
        operands: as those of :func:`rows_shown`.

    Returns:
        None where the call cannot be tried.
    """
    for place in [torch.device("cpu"), *[device] * torch.cuda.is_available()]:
        try:
            with torch_draws(0, place), torch.enable_grad(), regions_ended():
                return _adds_up(call, [_made_up(operand, place) for operand in operands])
        except Exception as error:  # whatever the user's code raises: it cannot be tried there
            if ends_a_gpu(error):
                return None
    return None


def _made_up(operand: Any, device: torch.device) -> Any:
    if not isinstance(operand, tuple):
        return operand
    tensor, extents, stays = operand
    if stays and not tensor.is_meta:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
    shape = [extent.fixed for extent in extents]
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(shape, dtype=tensor.dtype, device=device, requires_grad=True)
    return torch.zeros(shape, dtype=tensor.dtype, device=device)


def _adds_up(call: Callable[..., Any], given: Sequence[Any]) -> bool:
    leaves = [item for item in given if isinstance(item, Tensor) and item.requires_grad]
    # A function may change what it is given.
    made = pytree.tree_leaves(call(*(item.clone() if isinstance(item, Tensor) else item for item in given)))
    roots = [item for item in made if isinstance(item, Tensor) and item.requires_grad]
    if not roots:
        return True
    parts = [[_gradient(root) for root in roots] for _ in range(2)]
    seeds = [*parts, [first + second for first, second in zip(*parts, strict=True)]]
    found = [torch.autograd.grad(roots, leaves, seed, retain_graph=True, allow_unused=True) for seed in seeds]
    return all(map(_is_sum, *found))


def _gradient(root: Tensor) -> Tensor:
    low, high = _DECADES
    return torch.randn_like(root) * 10 ** (low + (high - low) * torch.rand_like(root.abs()))


def _is_sum(first: Tensor | None, second: Tensor | None, whole: Tensor | None) -> bool:
    if first is None or second is None or whole is None:
        return first is second is whole
    largest = max(float(item.abs().max()) if item.numel() else 0.0 for item in (first, second, whole))
    return not whole.numel() or float((first + second - whole).abs().max()) <= _FAR * largest
