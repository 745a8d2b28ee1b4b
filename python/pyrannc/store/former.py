"""Where a model and its optimizer were before a deployment, which may fail half way."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_STATE_DICTS = ("state_dict", "load_state_dict")
"""What a narrowed optimizer has of its own."""


class Former:
    """Devices, gradients and the optimizer's lists as they are now.

    Every rank has all tensors: that is so before a deployment, and while it has not ended.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._devices = [tensor.device for tensor in self._tensors]
        self._grads = [tensor.grad for tensor in self._tensors]
        self._optimizer = optimizer
        groups = [] if optimizer is None else optimizer.param_groups
        self._params: list[list[Any]] = [list(group["params"]) for group in groups]
        state = {} if optimizer is None else optimizer.state
        self._state = {param: dict(values) for param, values in state.items()}

    @torch.no_grad()
    def come_back(self) -> None:
        """Brings all that back. It needs no other rank."""
        for tensor, device, grad in zip(self._tensors, self._devices, self._grads, strict=True):
            tensor.grad = None
            tensor.data = tensor.data.to(device)
            tensor.grad = grad
        if self._optimizer is None:
            return
        for group, params in zip(self._optimizer.param_groups, self._params, strict=True):
            if not _are_same(group["params"], params):
                group["params"] = params
        for name in _STATE_DICTS:
            vars(self._optimizer).pop(name, None)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(lambda a, b: a is b, now, before))
