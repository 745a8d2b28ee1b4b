"""Gradients of parameters that a Span's backward leaves for later: a node of autograd of their own.

Its only result is a token that goes into the Span's own node, so that a backward comes here after that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyrannc.capture.torch_internals.gradients import backward_keeps_graph

Gradients: TypeAlias = Sequence[Tensor | None]


class Later:
    """What a Span's own node leaves.

    Attributes:
        compute: makes the gradients; None before the node has run.
    """

    def __init__(self) -> None:
        self.compute: Callable[[], Gradients] | None = None


class LaterNode(Function):
    """Takes parameters, gives a token."""

    @staticmethod
    def forward(ctx: Any, later: Later, *params: Tensor) -> Tensor:
        """The token."""
        ctx.set_materialize_grads(False)
        ctx.later, ctx.count = later, len(params)
        return token(params[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, came: Tensor | None) -> Any:
        """The gradients of the parameters, once the Span's own node has run."""
        later: Later = ctx.later
        if came is None or later.compute is None:
            return (None,) * (1 + ctx.count)
        found = later.compute()
        # Part of them may be asked for once more.
        later.compute = (lambda: found) if backward_keeps_graph() else None
        return (None, *found)


def token(device: torch.device) -> Tensor:
    """Nothing, on a device: its backward then runs on the stream of the forward."""
    return torch.empty(0, device=device)


def later_of(node: Any) -> Later | None:
    """What a node of autograd computes later; None where it is another's."""
    return node.later if getattr(node, "_forward_cls", None) is LaterNode else None
