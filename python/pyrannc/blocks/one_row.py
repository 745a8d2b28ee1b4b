"""What torch's kernels get wrong for a single row."""

from __future__ import annotations

import torch
from torch import Tensor, fx

_TRAINING = 5
"""Place of the flag among the arguments of batch normalisation."""


def needs_gradient_laid_out(node: fx.Node, device: torch.device) -> bool:
    """True for batch normalisation by its running statistics on a processor.

    Its backward reads the gradient of one row with channels last as if it lay like what came in.
    """
    return node.target is torch.ops.aten.batch_norm.default and device.type == "cpu" and not node.args[_TRAINING]


def gradient_laid_out(tensor: Tensor) -> Tensor:
    """The tensor, whose gradient comes contiguous if it is of one row."""
    if tensor.requires_grad and tensor.shape[0] == 1:
        tensor.register_hook(_contiguous)  # type: ignore[no-untyped-call]  # torch has no types for it
    return tensor


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.contiguous()
