"""Where a model and its optimizer were before a deployment, which may fail half way."""

from __future__ import annotations

import torch
from torch import nn

from pyrannc.store.optimizer import UserOptimizer


class Former:
    """Devices, gradients and the optimizer's lists as they are now.

    Every rank has all tensors: that is so before a deployment, and while it has not ended.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: UserOptimizer | None) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._devices = [tensor.device for tensor in self._tensors]
        self._grads = [tensor.grad for tensor in self._tensors]
        self._bring_optimizer_back = None if optimizer is None else optimizer.former()

    @torch.no_grad()
    def come_back(self) -> None:
        """Brings all that back. It needs no other rank."""
        for tensor, device, grad in zip(self._tensors, self._devices, self._grads, strict=True):
            tensor.grad = None
            tensor.data = tensor.data.to(device)
            tensor.grad = grad
        if self._bring_optimizer_back is not None:
            self._bring_optimizer_back()
