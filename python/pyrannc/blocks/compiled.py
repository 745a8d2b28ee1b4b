"""Compiled code of a Span: one node of autograd, whose inputs are parameters too, or two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyrannc.blocks.backward_parts import BackwardParts, in_parts
from pyrannc.blocks.form import Form, Meta
from pyrannc.blocks.graphs import lay_out
from pyrannc.blocks.joint import Ends, Joint, results_of
from pyrannc.blocks.later import Later, LaterNode, token
from pyrannc.blocks.lifted import Lifted
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture.torch_internals.compiler import compiled_by_inductor

Kernels: TypeAlias = Callable[[list[Tensor]], Sequence[Tensor]]
"""Compiled code; it empties the list that it is given."""

Strides: TypeAlias = Sequence[tuple[int, ...] | None]


def _compiled_backward(
    joint: Joint, form: Form, strides: Strides, device: torch.device
) -> BackwardParts[Kernels] | None:
    """Kernels for a backward; None without one.

    Args:
        strides: of what the forward's kernels keep, as far as known.
    """
    if joint.backward is None:
        return None
    lay_out(joint.backward, strides, joint.mode)
    parts = in_parts(joint.backward, joint.ends.differentiated, form.may_wait, joint.mode)
    first, left = compiled_by_inductor(parts.first, len(parts.early), joint.mode, "backward", device)
    second = None
    if parts.second is not None:
        lay_out(parts.second, left[len(parts.early) :], joint.mode)
        second, _ = compiled_by_inductor(parts.second, len(parts.late), joint.mode, "backward", device)
    return BackwardParts(first, parts.early, second, parts.late)


@dataclass(frozen=True)
class SpanCode:
    """A Span's compiled forward and backward.

    Attributes:
        form: what it is compiled for.
        ends: what goes in and comes out.
        lifted: what is drawn.
        whole: forward and backward as one graph, from which it was compiled just now; None for code of a former start.
        plain: the function that it stands for, given rows, numbers of Ops, and what the Span takes.
        numbers: how many Ops draw.
    """

    form: Form
    ends: Ends
    lifted: Lifted
    forward: Kernels
    backward: BackwardParts[Kernels] | None
    plain: Callable[..., Any]
    numbers: int
    randomness: Randomness
    whole: fx.GraphModule | None = None

    @staticmethod
    def compile(joint: Joint, form: Form, plain: Callable[..., Any], numbers: int, randomness: Randomness) -> SpanCode:
        """Makes kernels.

        Raises:
            Exception: the compiler cannot.
        """
        made = len(joint.ends.made)
        kind, device = "whole" if joint.backward is None else "forward", randomness.device
        forward, strides = compiled_by_inductor(joint.forward, made, joint.mode, kind, device)
        backward = _compiled_backward(joint, form, strides[made + len(joint.ends.changed) :], device)
        whole = joint.whole
        return SpanCode(form, joint.ends, joint.lifted, forward, backward, plain, numbers, randomness, whole)

    def __call__(self, numbers: Sequence[int], takes: Sequence[Tensor], came: set[tuple[bool, ...]]) -> Any:
        """What the Span gives: one Value by itself, others as a tuple.

        Args:
            numbers: of the Ops that draw.
            came: backwards with other gradients than expected say here which came, by what is made.
        """
        ends = self.ends
        drawn = self.lifted.draw(self.randomness, numbers)
        with self.lifted.placing(self.randomness, numbers):
            results = self._run(takes, drawn, came)
        made = len(ends.made)
        if ends.changed:
            with torch.no_grad():
                for place, contents in zip(ends.changed, results[made:], strict=False):
                    takes[place].copy_(contents)
        given = [takes[item.place] if item.taken else results[item.place] for item in ends.given]
        return given[0] if len(given) == 1 else tuple(given)

    def _run(self, takes: Sequence[Tensor], drawn: Sequence[Tensor], came: set[tuple[bool, ...]]) -> Sequence[Tensor]:
        """What the forward makes, and new contents of what it changes."""
        if self.backward is None:
            with torch.no_grad():
                return self.forward([*takes, *drawn])
        later, waits, tensors = self._set_late_apart(self.backward.late, takes)
        results: tuple[Tensor, ...] = _SpanNode.apply(self, came, later, waits, *tensors, *drawn)  # type: ignore[no-untyped-call]  # torch has no types for it
        return results

    @staticmethod
    def _set_late_apart(
        late: Sequence[int], takes: Sequence[Tensor]
    ) -> tuple[Later | None, Tensor | None, Sequence[Tensor]]:
        """Gives what gets its gradients later to a node of its own."""
        if not late:
            return None, None, takes
        later = Later()
        waits: Tensor = LaterNode.apply(later, *(takes[place] for place in late))  # type: ignore[no-untyped-call]  # likewise
        tensors = list(takes)
        for place in late:
            tensors[place] = tensors[place].detach()
        return later, waits, tensors

    def is_recomputed_for(self, wanted: Sequence[bool]) -> bool:
        """True for a backward with other gradients than it was compiled for."""
        return tuple(place for place, came in enumerate(wanted) if came) != self.ends.wanted

    def recompute(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of what came in, by the function itself; a backward took other gradients than expected."""
        form = self.form
        count = len(form.takes)
        leaves = [
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(tensors[:count], form.takes, strict=True)
        ]
        with torch.enable_grad(), self.lifted.given(self.randomness, tensors[count:]):
            results = results_of(self.plain(form.rows, *range(self.numbers), *leaves))
            made = [result for result, item in zip(results, self.ends.given, strict=True) if not item.taken]
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
        able = [place for place, meta in enumerate(self.ends.made) if meta.requires_grad]
        return able != list(self.ends.wanted) or len(able) > 1


class _SpanNode(Function):
    """Forward and backward of a Span."""

    @staticmethod
    def forward(
        ctx: Any, code: SpanCode, came: set[tuple[bool, ...]], later: Later | None, _: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results = tuple(code.forward(list(tensors)))
        ends = code.ends
        given = len(ends.made) + len(ends.changed)
        made, kept = results[:given], results[given:]
        ctx.set_materialize_grads(False)
        ctx.code, ctx.came, ctx.later, ctx.kept, ctx.count = code, came, later, len(kept), len(tensors)
        ctx.save_for_backward(*kept, *(tensors if code.may_be_recomputed else ()))
        without = [tensor for tensor, meta in zip(made, ends.made, strict=False) if not meta.requires_grad]
        ctx.mark_non_differentiable(*without, *made[len(ends.made) :])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        code, later = ctx.code, ctx.later
        ends: Ends = code.ends
        grads, saved = grads[: len(ends.made)], ctx.saved_tensors
        came = tuple(grad is not None for grad in grads)
        if not any(came):
            if later is not None:
                later.compute = None
            return (None,) * (4 + ctx.count)
        if code.is_recomputed_for(came):
            ctx.came.add(came)
            found = code.recompute(saved[ctx.kept :], grads)
            if later is not None:
                late = [found[place] for place in code.backward.late]
                later.compute = lambda: late
        else:
            kept = [*saved[: ctx.kept], *(_laid_out(grads[place], ends.made[place]) for place in ends.wanted)]
            del saved, grads
            # What is kept goes as the kernels have read it, unless the graph stays.
            ctx.maybe_clear_saved_tensors()
            found = _computed(code, later, kept)
        waits = None if later is None else token(code.randomness.device)
        return (None, None, None, waits, *found, *(None for _ in range(ctx.count - len(found))))


def _computed(code: SpanCode, later: Later | None, kept: list[Tensor]) -> list[Tensor | None]:
    """The gradients of what comes into a Span, but those that come later."""
    backward = code.backward
    assert backward is not None, "it trains"
    found: list[Tensor | None] = [None] * len(code.form.takes)
    results = backward.first(kept)
    for place, grad in zip(backward.early, results, strict=False):
        found[place] = grad
    second = backward.second
    if later is not None:
        assert second is not None, "it computes later"
        left = results[len(backward.early) :]
        later.compute = lambda: second([*left])
    return found


def _laid_out(grad: Tensor | None, meta: Meta) -> Tensor:
    """A gradient as the backward takes it."""
    assert grad is not None, "it is wanted"
    if grad.stride() == meta.stride:
        return grad
    return torch.empty_strided(meta.shape, meta.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
