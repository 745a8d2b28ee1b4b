"""Slices of a whole dimension.

Whether Python leaves one out depends on what it knows of the extent; here all of them go, so that a call gives the same
Graph however its lengths were known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyrannc.capture.nodes.dims import Dim

_ALIAS = torch.ops.aten.alias.default
_SLICE = torch.ops.aten.slice.Tensor
_WHOLE = (0, None, None, 1)
"""Dimension, begin, end and step, where they are not given."""


def drop_whole_slices(graph: fx.Graph, read: Callable[[Any], Dim | None]) -> None:
    """Drops slices that take all that they are given; others begin at 0 where nothing is said."""
    for node in list(graph.nodes):
        if node.target is _SLICE:
            taken, dim, begin, end, step = node.args + _WHOLE[len(node.args) - 1 :]
            node.args = (taken, dim, 0 if begin is None else begin, sys.maxsize if end is None else end, step)
        if _takes_all(node, read) and not _is_returned_beside(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _is_returned_beside(node: fx.Node) -> bool:
    """True for a result that would be another one, or an argument, without the slice."""
    (taken,) = node.all_input_nodes[:1]
    own = taken.op == "call_function" and all(user.op != "output" for user in taken.users)
    return not own and any(user.op == "output" for user in node.users)


def _takes_all(node: fx.Node, read: Callable[[Any], Dim | None]) -> bool:
    if node.target is not _SLICE:
        return node.target is _ALIAS
    taken, dim, begin, end, step = node.args
    if begin != 0 or step != 1:
        return False
    size = read(taken.meta["val"].shape[dim])  # type: ignore[union-attr]  # a tensor
    end = read(end.meta["val"] if isinstance(end, fx.Node) else end)
    if size is None or end is None:
        return False
    return end == size or (not end.per_row and end.fixed >= (sys.maxsize if size.per_row else size.fixed))
