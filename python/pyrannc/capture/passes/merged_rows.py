"""Linear layers on rows that stand with other extents in one dimension, as after attention whose steps come first.

Where others come before them in their dimension, nothing can be cut. The layer gives the same where they stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pyrannc.capture.nodes.dims import Dim

_LINEAR = torch.ops.aten.linear.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def keep_rows_apart(graph: fx.Graph, read: Callable[[Any], Dim | None]) -> None:
    """Rewrites linear layers between two views, the first of which puts rows with others, and the second apart.

    Args:
        graph: the calls.
        read: an extent as a function of the rows.
    """
    for node in list(graph.nodes):
        if node.target is not _LINEAR or node.args[0].target not in _VIEWS:
            continue
        merged = node.args[0]
        source, width = merged.args[0], merged.meta["val"].shape[-1]
        leading = _leading(source.meta["val"].shape, width, read)
        stand_apart = leading is None or merged.meta["val"].dim() == leading + 1
        if stand_apart or not all(user.target in _VIEWS for user in node.users):
            continue
        sizes = source.meta["val"].shape[:leading]
        with graph.inserting_before(node):
            extents = [size if isinstance(size, int) else -1 for size in sizes]
            apart = graph.call_function(merged.target, (source, [*extents, width]))
        apart.meta = {**merged.meta, "val": source.meta["val"].view(*sizes, width)}
        node.replace_input_with(merged, apart)
        made = node.meta["val"]
        node.meta["val"] = made.view(*sizes, made.shape[-1])


def _leading(shape: torch.Size, width: Any, read: Callable[[Any], Dim | None]) -> int | None:
    """How many dimensions stay before those that make the width, where rows are in one of them, but not the first."""
    extents = [read(size) for size in shape]
    with_rows = [dim for dim, extent in enumerate(extents) if extent is None or extent.per_row]
    if len(with_rows) != 1 or with_rows == [0] or extents[with_rows[0]] is None:
        return None
    ends = range(with_rows[0] + 1, len(shape))
    return next((end for end in ends if math.prod(shape[end:]) == width), None)
