"""``torch.cond`` and ``while_loop`` run by Python: torch would compile their parts, which it cannot in a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from .torch_internals.patching import CONTROL_FLOW


@contextmanager
def plain_control_flow() -> Iterator[None]:
    """They branch and loop by themselves while active; values and gradients are the same."""
    with ExitStack() as stack:
        for point in CONTROL_FLOW:
            stack.enter_context(point.replaced_by(_PLAIN[point.name]))
        yield


def plain_cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()
) -> Any:
    """``torch.cond`` as Python branches."""
    return (true_fn if bool(pred) else false_fn)(*operands)


def plain_while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any] = (),
) -> Any:
    """``torch.while_loop`` as Python loops."""
    carried = tuple(carried_inputs)
    while bool(cond_fn(*carried, *additional_inputs)):
        carried = body_fn(*carried, *additional_inputs)
    return carried


_PLAIN = {"cond": plain_cond, "while_loop": plain_while_loop}
