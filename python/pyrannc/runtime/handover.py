"""The join of a call with the user's autograd graph: its outputs lead back to the call's own backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.gradients import backward_keeps_graph, runs_in_backward
from pyrannc.capture.torch_internals.levels import is_batched, is_batched_backward
from pyrannc.capture.torch_internals.tensors import is_view
from pyrannc.errors import RaNNCError
from pyrannc.store.one_leaf import OneLeaf, lead_to_one_leaf


class Differentiate(Protocol):
    """From the gradients of outputs to those of inputs."""

    def __call__(
        self, grads: Sequence[Tensor | None], *, keep_graph: bool, for_params: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of the inputs.

        Args:
            grads: of the outputs.
            keep_graph: it may be called again.
            for_params: parameters get gradients too.
        """


def hand_over(
    made: list[Tensor],
    constant: list[Tensor],
    inputs: Sequence[Tensor],
    params: Tensor,
    leaf: OneLeaf,
    backward: Differentiate,
) -> list[Tensor]:
    """The outputs ``made``, with gradients that lead to ``backward``.

    Args:
        constant: those among them that no gradient comes back for.
        inputs: of the call, that require gradients.
        params: a tensor behind which are the parameters.
        leaf: that of them which a backward has to reach for all to get their gradients.
    """
    handed = _Handover.apply(backward, leaf, made, constant, params, *inputs)  # type: ignore[no-untyped-call]  # torch has no types for it
    return list(handed)


def no_view(tensor: Tensor) -> Tensor:
    """The same memory in a tensor that is no view of another, as outputs must be that a script changes in place."""
    if not is_view(tensor):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    made = torch.empty(0, dtype=plain.dtype, device=plain.device)
    return made.set_(plain.untyped_storage(), plain.storage_offset(), plain.size(), plain.stride())


class _Handover(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backward: Differentiate,
        leaf: OneLeaf,
        made: list[Tensor],
        constant: list[Tensor],
        params: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.of_call, ctx.params = backward, params.grad_fn
        if not inputs:
            lead_to_one_leaf(ctx, leaf)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # torch would take them for constants, and leave out what they add to the gradients.
            raise RaNNCError(
                "a gradient through the model was asked for with create_graph=True, as for a gradient penalty, but "
                "RaNNC computes no gradients of gradients: leave out create_graph=True if nothing is differentiated "
                "again, or compute the penalty with finite differences, from further calls of the model"
            )
        if is_batched_backward() or any(grad is not None and is_batched(grad) for grad in grads):
            raise RaNNCError(
                "several gradients through the model were asked for at once (is_grads_batched=True, or torch.vmap "
                "round a backward), which RaNNC cannot follow: ask for one after another"
            )
        for_params = runs_in_backward(ctx.params)
        found = ctx.of_call(grads, keep_graph=backward_keeps_graph(), for_params=for_params)
        return (None, None, None, None, None, *found)
