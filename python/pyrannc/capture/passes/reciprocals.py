"""Products with one over the number of rows, as quotients: what they do to rows is known."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mul.Tensor, _ATEN.mul.Scalar)
_FACTORS = 2


def divide_by_rows(graph: fx.Graph) -> None:
    """Rewrites ``x * (c / rows)`` in ``graph`` as ``x * c / rows``."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _PRODUCTS or len(node.args) != _FACTORS:
            continue
        for tensor, factor in (node.args, reversed(node.args)):
            if _is_reciprocal(factor) and isinstance(tensor.meta.get("val"), Tensor):
                _divide(graph, node, tensor, *factor.args)
                break


def _is_reciprocal(factor: Any) -> bool:
    if not isinstance(factor, fx.Node) or factor.target is not operator.truediv:
        return False
    above, below = factor.args
    return isinstance(above, (int, float)) and isinstance(below, fx.Node)


def _divide(graph: fx.Graph, product: fx.Node, tensor: fx.Node, above: float, below: fx.Node) -> None:
    if above != 1:
        with graph.inserting_before(product):
            times = graph.call_function(_ATEN.mul.Tensor, (tensor, float(above)))
        times.meta = dict(product.meta)
        tensor = times
    product.target, product.args, product.kwargs = _ATEN.div.Tensor, (tensor, below), {}
