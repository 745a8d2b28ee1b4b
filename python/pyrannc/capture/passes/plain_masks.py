"""Attention masks that hide nothing, or the future only: attention has faster kernels without them.

Libraries leave such masks out by themselves, but not where a call is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.operands import arguments
from pyrannc.capture.torch_internals.operators import OpOverload, schema

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
# Two numbers of rows under which nothing that is the same for all rows looks alike by accident.
_ROWS = (3, 5)
_MOST_ELEMENTS = 1 << 27

_FILLED = {"ones", "zeros", "full", "new_ones", "new_zeros", "new_full"}
_SHAPED = {"unsqueeze", "squeeze", "view", "reshape", "expand", "permute", "transpose", "alias"}
_SHAPED |= {"detach", "clone", "to", "_to_copy", "contiguous"}
_ELEMENTWISE = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and"}
_ELEMENTWISE |= {"bitwise_or", "bitwise_not", "__and__", "__or__", "add", "sub", "mul", "where", "floor_divide"}
_ALONG = {"cumsum": 1, "diff": 1, "tril": 2, "triu": 2}
"""What runs along a dimension, or the last two."""

Size = Callable[[Any], Dim | None]
"""An integer of a trace as a function of the rows."""


def drop_plain_masks(graph: fx.Graph, size: Size) -> None:
    """Rewrites attention in ``graph`` whose mask is made of sizes alone and needs no kernel that reads it."""
    known: dict[fx.Node, str] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _ATTENTION:
            continue
        given = arguments(node)
        mask = given["attn_mask"]
        if not isinstance(mask, fx.Node) or given["is_causal"] or mask.meta["val"].dtype != torch.bool:
            continue
        if mask not in known:
            known[mask] = _kind(mask, size)
        if known[mask]:
            named = {"dropout_p": given["dropout_p"], "is_causal": known[mask] == "causal"}
            named |= {name: given[name] for name in ("scale", "enable_gqa")}
            node.args, node.kwargs = (given["query"], given["key"], given["value"]), named


def _kind(mask: fx.Node, size: Size) -> str:
    """``"empty"`` where a mask hides nothing, ``"causal"`` where it hides the future only, else nothing."""
    ancestors = _made_of_sizes(mask)
    if ancestors is None:
        return ""
    queries, keys = mask.meta["val"].shape[-2:]
    if not (isinstance(queries, int) and isinstance(keys, int)) or queries * keys * max(_ROWS) > _MOST_ELEMENTS:
        return ""
    made = [_evaluate(ancestors, size, rows) for rows in _ROWS]
    if all(bool(tensor.all()) for tensor in made):
        return "empty"
    future = torch.ones(queries, keys, dtype=torch.bool, device="cpu").tril()
    return "causal" if queries == keys and all(torch.equal(t, future.expand_as(t)) for t in made) else ""


def _made_of_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """The Ops that a mask is made by, in order, if it depends on sizes alone, and not on the numbers of rows."""
    numbered: dict[fx.Node, bool] = {}
    left = [mask]
    while left:
        node = left[-1]
        if node.op != "call_function":
            return None
        operands = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), Tensor)]
        before = [operand for operand in operands if operand not in numbered]
        if before:
            left += reversed(before)
        elif left.pop() not in numbered:
            found = _numbers_rows(node, {operand: numbered[operand] for operand in operands})
            if found is None:
                return None
            numbered[node] = found
    return None if numbered[mask] else list(numbered)


def _numbers_rows(node: fx.Node, operands: dict[fx.Node, bool]) -> bool | None:
    """Whether an Op's result has numbers of rows in it; None for an Op that makes something else of rows, or of data.

    Args:
        operands: the tensors that it takes, and whether they have.
    """
    if not isinstance(node.target, OpOverload):
        return None
    name = schema(node.target).name.removeprefix("aten::")
    of_rows, any_operand = len(operands) < len(node.all_input_nodes), any(operands.values())
    if name in ("arange", "slice", "select"):
        return of_rows or any_operand
    if name == "index":
        # Numbers of rows may choose rows.
        return None if of_rows else operands[node.args[0]]  # type: ignore[index]  # what is indexed is a node
    if name in _FILLED:
        return None if isinstance(arguments(node).get("fill_value"), fx.Node) else False
    if name in _SHAPED:
        return any_operand
    within = name in _ELEMENTWISE or (name in _ALONG and _runs_within_rows(node, _ALONG[name]))
    return False if within and not of_rows and not any_operand else None


def _runs_within_rows(node: fx.Node, dims: int) -> bool:
    """True when no dimension that an Op runs along depends on the number of rows."""
    shape = node.meta["val"].shape
    along = shape[-2:] if dims > 1 else [shape[arguments(node).get("dim", -1)]]
    return all(isinstance(extent, int) for extent in along)


def _evaluate(ops: list[fx.Node], size: Size, rows: int) -> Tensor:
    """The last Op's result, on the host, for some number of rows."""
    env: dict[fx.Node, Any] = {}

    def argument(node: fx.Node) -> Any:
        if node in env:
            return env[node]
        dim = size(node.meta["val"])
        if dim is None:
            raise ValueError(f"{node} is not affine in the rows")
        return dim.at(rows)

    for op in ops:
        args = fx.node.map_arg(op.args, argument)
        kwargs = {name: _on_host(item) for name, item in fx.node.map_arg(op.kwargs, argument).items()}
        env[op] = op.target(*[_on_host(item) for item in args], **kwargs)  # type: ignore[operator]  # it is an operator
    made: Tensor = env[ops[-1]]
    return made


def _on_host(item: Any) -> Any:
    return torch.device("cpu") if isinstance(item, torch.device) else item
