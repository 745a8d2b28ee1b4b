"""Python's own bindings of operators, which are called several times faster than by the operators' schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten

BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.div.Tensor: torch.div,
    _aten.linear.default: functional.linear,
    _aten.matmul.default: torch.matmul,
    _aten.bmm.default: torch.bmm,
    _aten.conv2d.default: torch.conv2d,
    _aten.conv3d.default: torch.conv3d,
    _aten.embedding.default: torch.embedding,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.group_norm.default: torch.group_norm,
    _aten.softmax.int: torch.softmax,
    _aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    _aten.dropout.default: torch.dropout,
    _aten.relu.default: torch.relu,
    _aten.gelu.default: functional.gelu,
    _aten.silu.default: functional.silu,
    _aten.tanh.default: torch.tanh,
    _aten.view.default: Tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.expand.default: Tensor.expand,
    _aten.cat.default: torch.cat,
}
"""By operator, what takes the same arguments and does the same."""
