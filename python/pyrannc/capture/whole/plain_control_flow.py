"""``torch.cond`` and ``while_loop`` run by Python: torch would compile their parts, which it cannot in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import Function

from pyrannc.capture.torch_internals.patching import CONTROL_FLOW
from pyrannc.capture.user.flatten import flatten

Look: TypeAlias = Callable[[Callable[..., Any], Sequence[Any]], None]


@contextmanager
def plain_control_flow(idle: Sequence[Tensor] = (), look: Look | None = None) -> Iterator[None]:
    """They branch and loop by themselves while active; values and gradients are the same.

    Args:
        idle: what functions that may not run compute with, which gets gradients of zeros then.
        look: given functions that may not run, with what they would be called with.
    """
    plain: dict[str, Callable[..., Any]] = {"cond": plain_cond, "while_loop": plain_while_loop}
    with ExitStack() as stack:
        for point in CONTROL_FLOW:
            stack.enter_context(point.replaced_by(partial(plain[point.name], idle=idle, look=look)))
        yield


def plain_cond(
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
    *,
    idle: Sequence[Tensor] = (),
    look: Look | None = None,
) -> Any:
    """``torch.cond`` as Python branches."""
    if look is not None:
        look(true_fn, operands)
        look(false_fn, operands)
    made = (true_fn if bool(pred) else false_fn)(*operands)
    return _all_reaching(made, (*operands, *idle))


def plain_while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
    *,
    idle: Sequence[Tensor] = (),
    look: Look | None = None,
) -> Any:
    """``torch.while_loop`` as Python loops."""
    carried = tuple(carried_inputs)
    if look is not None:
        look(body_fn, (*carried, *additional_inputs))
    turns = 0
    while bool(cond_fn(*carried, *additional_inputs)):
        carried = body_fn(*carried, *additional_inputs)
        turns += 1
    return carried if turns else _all_reaching(carried, (*additional_inputs, *idle))


def _all_reaching(made: Any, idle: Sequence[Any]) -> Any:
    results, structure = flatten(made)
    found = reaching(tuple(results), idle)
    return made if all(a is b for a, b in zip(found, results, strict=True)) else structure.rebuild(found)


class _Reaching(Function):
    """A copy of a tensor; what no gradient comes to through it gets one of zeros, as ``torch.cond`` gives."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *idle: Tensor) -> Tensor:
        ctx.idle = [(item.shape, item.dtype, item.device) for item in idle]
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.idle)


def reaching(results: tuple[Tensor, ...], idle: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results, from the first of which that can have gradients these lead to ``idle``, too."""
    wanting = [item for item in idle if isinstance(item, Tensor) and item.requires_grad]
    place = next((place for place, item in enumerate(results) if item.is_floating_point()), None)
    if not wanting or place is None or not torch.is_grad_enabled():
        return results
    found = _Reaching.apply(results[place], *wanting)  # type: ignore[no-untyped-call]  # torch has no types for it
    return (*results[:place], found, *results[place + 1 :])
