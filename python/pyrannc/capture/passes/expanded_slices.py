"""One of equal rows: a slice that takes the first of what ``expand`` has made of one, as of prompts that are tuned.

It is what was expanded. As a slice it would take a row of the batch, on which all rows then wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyrannc.capture.nodes.dims import Dim

_EXPAND = torch.ops.aten.expand.default
_SLICE = torch.ops.aten.slice.Tensor
_TO = torch.ops.aten.to


def drop_expanded_slices(graph: fx.Graph, read: Callable[[Any], Dim | None]) -> None:
    """Replaces slices of expanded tensors that have the form of what was expanded, where they begin at 0."""
    for node in list(graph.nodes):
        if node.target is not _SLICE or node.args[2] != 0:
            continue
        taken: Any = node.args[0]
        while _changes_nothing(taken):
            taken = taken.args[0]
        if taken.target is not _EXPAND:
            continue
        source: Any = taken.args[0]
        form = _form(node, read)
        if None not in form and form == _form(source, read) and not _is_returned(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _changes_nothing(node: fx.Node) -> bool:
    """True for a ``to`` that gives what it takes."""
    if getattr(node.target, "overloadpacket", None) is not _TO or True in (*node.args, *node.kwargs.values()):
        return False
    made, given = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]  # a tensor
    return bool(made.dtype == given.dtype and made.device == given.device)


def _form(node: fx.Node, read: Callable[[Any], Dim | None]) -> list[Dim | None]:
    return [read(size) for size in node.meta["val"].shape]


def _is_returned(node: fx.Node, source: fx.Node) -> bool:
    """True for a result that would be an argument, or another result, without the slice."""
    return source.op != "call_function" or any(user.op == "output" for user in (*node.users, *source.users))
