"""Ops that read memory by strides: what they read is laid out as it was when the model was traced.

A Value may lie otherwise where it runs: rows that have been joined, sent or received lie one behind the other. No other
Op sees that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.errors import CaptureError

from .facts import FACTS, OF_PLACE, PLACE, TensorFacts, written_memory
from .ops import arguments
from .source import Place

_ATEN = torch.ops.aten
_STRIDED = (_ATEN.as_strided.default, _ATEN.as_strided_copy.default)


def pin_layouts(graph: fx.Graph) -> None:
    """Rewrites ``graph``.

    Raises:
        CaptureError: an Op reads what cannot be laid out so, or what is changed later.
    """
    written_later: set[int] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _STRIDED:
            _pin(graph, node, written_later)
        written_later |= written_memory(node)


def _pin(graph: fx.Graph, node: fx.Node, written_later: set[int]) -> None:
    given = arguments(node)
    base = given["self"]
    tensor: Tensor = base.meta["val"]
    order = sorted(range(tensor.dim()), key=lambda dim: -_as_number(tensor.stride(dim)))
    own = {facts.storage for facts in (*base.meta.get(FACTS, {}).values(), *node.meta.get(FACTS, {}).values())}
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor) or own & written_later:
        place = node.meta.get(PLACE, Place(""))
        raise CaptureError(
            f"{place} reads memory by strides (as_strided) from a tensor that has gaps, or that is changed in place "
            "afterwards; make it contiguous before, or name the sub-module in leaf_modules"
        )
    with graph.inserting_before(node):
        laid = base
        if order != sorted(order):
            laid = _add(graph, node, _ATEN.permute.default, laid, order)
        # The dimensions stay in the order of memory: what is joined, sent or received lies so, too.
        laid = _add(graph, node, _ATEN.clone.default, laid, memory_format=torch.contiguous_format)
    offset = given["storage_offset"]
    node.args = (laid, given["size"], given["stride"], None if offset is None else offset - tensor.storage_offset())
    node.kwargs = {}


def _as_number(stride: Any) -> int:
    """A stride, or for one that depends on the rows what it is for the traced ones."""
    return int(stride) if isinstance(stride, int) else int(stride.node.hint)


def _add(graph: fx.Graph, like: fx.Node, target: Any, operand: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A new Op of ``operand`` at the place of ``like`` in the model's source."""
    node = graph.call_function(target, (operand, *args), kwargs)
    with torch.no_grad():
        node.meta["val"] = target(operand.meta["val"], *args, **kwargs)
    requires_grad = any(facts.requires_grad for facts in operand.meta.get(FACTS, {}).values())
    node.meta[FACTS] = {None: TensorFacts(requires_grad, None)}
    node.meta |= {key: like.meta[key] for key in OF_PLACE if key in like.meta}
    return node
