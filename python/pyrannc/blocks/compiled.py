"""Compiled code of a Span: one node of autograd, whose inputs are parameters too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyrannc.blocks.form import Form, Meta
from pyrannc.blocks.graphs import lay_out
from pyrannc.blocks.joint import Joint, results_of
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture.torch_internals import compiled_by_inductor

Kernels: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""Compiled code; it empties the list that it is given."""


@dataclass(frozen=True)
class SpanCode:
    """A Span's compiled forward and backward.

    Attributes:
        form: what it is compiled for.
        joint: what it was compiled from, without graphs.
        plain: the function that it stands for, given rows, numbers of Ops, and what the Span takes.
        numbers: how many Ops draw.
    """

    form: Form
    joint: Joint
    forward: Kernels
    backward: Kernels | None
    plain: Callable[..., Any]
    numbers: int
    randomness: Randomness

    @staticmethod
    def compile(joint: Joint, form: Form, plain: Callable[..., Any], numbers: int, randomness: Randomness) -> SpanCode:
        """Makes kernels.

        Raises:
            Exception: the compiler cannot.
        """
        made = len(joint.made)
        kind, device = "whole" if joint.backward is None else "forward", randomness.device
        forward, strides = compiled_by_inductor(joint.forward, made, joint.mode, kind, device)
        backward = None
        if joint.backward is not None:
            lay_out(joint.backward, strides[made + len(joint.changed) :], joint.mode)
            backward, _ = compiled_by_inductor(
                joint.backward, len(joint.differentiated), joint.mode, "backward", device
            )
        return SpanCode(form, joint, forward, backward, plain, numbers, randomness)

    def __call__(self, numbers: Sequence[int], takes: Sequence[Tensor], came: set[tuple[bool, ...]]) -> Any:
        """What the Span gives: one Value by itself, others as a tuple.

        Args:
            numbers: of the Ops that draw.
            came: backwards with other gradients than expected say here which came, by what is made.
        """
        joint = self.joint
        drawn = joint.lifted.draw(self.randomness, numbers)
        if self.backward is None:
            with torch.no_grad():
                results = self.forward([*takes, *drawn])
        else:
            results = _SpanNode.apply(self, came, *takes, *drawn)  # type: ignore[no-untyped-call]  # torch has no types for it
        made = len(joint.made)
        if joint.changed:
            with torch.no_grad():
                for place, contents in zip(joint.changed, results[made:], strict=False):
                    takes[place].copy_(contents)
        given = [takes[item.place] if item.taken else results[item.place] for item in joint.given]
        return given[0] if len(given) == 1 else tuple(given)

    def is_recomputed_for(self, wanted: Sequence[bool]) -> bool:
        """True for a backward with other gradients than it was compiled for."""
        return tuple(place for place, came in enumerate(wanted) if came) != self.joint.wanted

    def recompute(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of what came in, by the function itself; a backward took other gradients than expected."""
        joint, form = self.joint, self.form
        count = len(form.takes)
        leaves = [
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(tensors[:count], form.takes, strict=True)
        ]
        with torch.enable_grad(), joint.lifted.given(self.randomness, tensors[count:]):
            results = results_of(self.plain(form.rows, *range(self.numbers), *leaves))
            made = [result for result, item in zip(results, joint.given, strict=True) if not item.taken]
        pairs = [(root, grad) for root, grad in zip(made, grads, strict=True) if grad is not None]
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        found = torch.autograd.grad(
            [root for root, _ in pairs], sources, [grad for _, grad in pairs], allow_unused=True
        )
        coming = iter(found)
        return [next(coming) if leaf.requires_grad else None for leaf in leaves]

    @property
    def may_be_recomputed(self) -> bool:
        """True when a backward may come with other gradients than it was compiled for."""
        able = [place for place, meta in enumerate(self.joint.made) if meta.requires_grad]
        return able != list(self.joint.wanted) or len(able) > 1


class _SpanNode(Function):
    """Forward and backward of a Span."""

    @staticmethod
    def forward(ctx: Any, code: SpanCode, came: set[tuple[bool, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(code.forward(list(tensors)))
        joint = code.joint
        given = len(joint.made) + len(joint.changed)
        made, kept = results[:given], results[given:]
        ctx.set_materialize_grads(False)
        ctx.code, ctx.came, ctx.kept, ctx.count = code, came, len(kept), len(tensors)
        ctx.save_for_backward(*kept, *(tensors if code.may_be_recomputed else ()))
        without = [tensor for tensor, meta in zip(made, joint.made, strict=False) if not meta.requires_grad]
        ctx.mark_non_differentiable(*without, *made[len(joint.made) :])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        code: SpanCode = ctx.code
        joint = code.joint
        found: list[Tensor | None] = [None] * (2 + ctx.count)
        grads, saved = grads[: len(joint.made)], ctx.saved_tensors
        came = tuple(grad is not None for grad in grads)
        if not any(came):
            return tuple(found)
        if code.is_recomputed_for(came):
            ctx.came.add(came)
            found[2 : 2 + len(code.form.takes)] = code.recompute(saved[ctx.kept :], grads)
            return tuple(found)
        kept = [*saved[: ctx.kept], *(_laid_out(grads[place], joint.made[place]) for place in joint.wanted)]
        del saved, grads
        # What is kept goes as the kernels have read it, unless the graph stays.
        ctx.maybe_clear_saved_tensors()
        assert code.backward is not None, "it trains"
        for place, grad in zip(joint.differentiated, code.backward(kept), strict=True):
            found[2 + place] = grad
        return tuple(found)


def _laid_out(grad: Tensor | None, meta: Meta) -> Tensor:
    """A gradient as the backward takes it."""
    assert grad is not None, "it is wanted"
    if grad.stride() == meta.stride:
        return grad
    return torch.empty_strided(meta.shape, meta.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
