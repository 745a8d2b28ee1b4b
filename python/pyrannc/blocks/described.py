"""The function of a Span as text that says all of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyrannc.blocks.bindings import BINDINGS
from pyrannc.blocks.draw import DrawnOp, name_of_law
from pyrannc.blocks.one_row import gradient_laid_out
from pyrannc.blocks.randomness import Placer
from pyrannc.capture.torch_internals.operators import SET_GRAD_ENABLED, OpOverload

_NAMES: dict[Callable[..., Any], str] = {
    **{function: f"{op}" for op, function in BINDINGS.items()},
    **{function: function.__name__ for function in (operator.mul, operator.add, operator.getitem)},
    torch.is_grad_enabled: "is_grad_enabled",
    SET_GRAD_ENABLED: "set_grad_enabled",
    gradient_laid_out: "gradient laid out",
}
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.device)


class _Unknown(Exception):
    """Something has no text."""


def described(graph: fx.Graph, helpers: dict[Callable[..., Any], str]) -> str | None:
    """The text of a function; None where some part has none.

    Args:
        helpers: functions that it may call besides operators, and their names.
    """
    numbers = {node: place for place, node in enumerate(graph.nodes)}
    try:
        return "\n".join(
            f"{node.op} {_target(node, helpers)} {_text(node.args, numbers)} {_text(node.kwargs, numbers)}"
            for node in graph.nodes
        )
    except _Unknown:
        return None


def _target(node: fx.Node, helpers: dict[Callable[..., Any], str]) -> str:
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        # They come in their order, whatever they are called.
        return ""
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function":
        raise _Unknown
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, DrawnOp):
        return f"draw {name_of_law(target.law)} {target.dtype} {target.row_dim} {target.by_rows}"
    if isinstance(target, Placer):
        return f"place {target.by_rows} {target.elsewhere}"
    name = _NAMES.get(target) or helpers.get(target)
    if name is None:
        raise _Unknown
    return name


def _text(item: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(item, fx.Node):
        return f"%{numbers[item]}"
    if item is None or isinstance(item, _PLAIN):
        return f"{type(item).__name__} {item!r}"
    if isinstance(item, slice):
        return f"slice{_text((item.start, item.stop, item.step), numbers)}"
    if isinstance(item, (list, tuple)):
        return f"{type(item).__name__}({', '.join(_text(part, numbers) for part in item)})"
    if isinstance(item, dict):
        return f"dict({', '.join(f'{name}: {_text(part, numbers)}' for name, part in item.items())})"
    raise _Unknown
