"""Where a model and its optimizer were before a deployment, which may fail half way."""

from __future__ import annotations

import torch
from torch import nn

from pyrannc.store.elsewhere import bring_here
from pyrannc.store.optimizer import UserOptimizer


class Former:
    """Contents, devices, gradients and the optimizer's lists as they are now.

    Every rank has all tensors before a deployment; they are kept until it has ended.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: UserOptimizer | None) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._contents = [tensor.data for tensor in self._tensors]
        self._grads = [tensor.grad for tensor in self._tensors]
        self._bring_optimizer_back = None if optimizer is None else optimizer.former()

    @torch.no_grad()
    def come_back(self) -> None:
        """Brings all that back. It needs no other rank."""
        for tensor, contents, grad in zip(self._tensors, self._contents, self._grads, strict=True):
            tensor.grad = None
            bring_here(tensor, contents)
            tensor.grad = grad
        if self._bring_optimizer_back is not None:
            self._bring_optimizer_back()
