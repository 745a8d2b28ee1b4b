"""Leaves: what Stages compute with in the place of parameters."""

from __future__ import annotations

from torch import Tensor, nn


def leaf_of(param: nn.Parameter) -> Tensor:
    """A tensor that shares the parameter's memory, but has a ``.grad`` of its own."""
    return param.detach().requires_grad_(param.requires_grad)
