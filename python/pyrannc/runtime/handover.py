"""The join of a call with the user's autograd graph: its outputs lead back to the call's own backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Differentiate: TypeAlias = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""From the gradients of outputs to those of inputs."""


def hand_over(
    made: list[Tensor], constant: list[Tensor], inputs: Sequence[Tensor], backward: Differentiate
) -> list[Tensor]:
    """The outputs ``made``, with gradients that lead to ``backward``.

    Args:
        constant: those among them that no gradient comes back for.
        inputs: of the call, that require gradients.
    """
    # Outputs lead back even where no input does.
    anchor = torch.empty(0, requires_grad=True)
    handed = _Handover.apply(backward, made, constant, anchor, *inputs)  # type: ignore[no-untyped-call]  # torch has no types for it
    return list(handed)


class _Handover(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backward: Differentiate, made: list[Tensor], constant: list[Tensor], anchor: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.of_call = backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.of_call(grads))
