"""Images with channels last in memory, as GPUs' convolutions want them; Ops that follow keep to the layout they find.

Compiled by itself, a Span would lay out its images anew, and lay out what it gives as the model does: two copies, and
one of them kept for the backward.
"""

from __future__ import annotations

import torch
from torch import fx

from pyrannc.capture import Captured
from pyrannc.capture.nodes.operands import arguments
from pyrannc.core.graph import GraphFacts

_aten = torch.ops.aten
_CONVOLUTIONS = (
    _aten.conv2d.default,
    _aten.conv2d.padding,
    _aten.conv_transpose2d.input,
    _aten.convolution.default,
)
DIMS = 4
"""Of images: rows, channels, height, width."""


def convolutions_of_images(captured: Captured) -> frozenset[int]:
    """Ops whose first operand is an image that is to lie with channels last.

    Empty where some convolution has groups of several channels, as torch's compiler decides: such kernels may be many
    times slower then.
    """
    found = [op for op, node in enumerate(captured.op_nodes) if node.target in _CONVOLUTIONS and _is_image(node)]
    if any(_has_large_groups(captured.op_nodes[op]) for op in found):
        return frozenset()
    return frozenset(found)


def images(captured: Captured, facts: GraphFacts) -> frozenset[int]:
    """Values that lie with channels last where those convolutions run: what these give, and what is made of it."""
    first, found = convolutions_of_images(captured), set[int]()
    for op, own in enumerate(facts.ops) if first else ():
        if op not in first and not found.intersection(own.operands):
            continue
        for value in own.results:
            is_view = facts.values[value].alias_of is not None and not own.mutates
            if len(facts.values[value].shape) == DIMS and not is_view:
                found.add(value)
    return frozenset(found)


def _is_image(node: fx.Node) -> bool:
    return bool(arguments(node)["input"].meta["val"].dim() == DIMS)


def _has_large_groups(node: fx.Node) -> bool:
    given = arguments(node)
    weight = given["weight"].meta["val"]
    transposed = node.target is _aten.conv_transpose2d.input or given.get("transposed", False)
    per_group = weight.shape[0] // given["groups"] if transposed else weight.shape[1]
    return bool(given["groups"] > 1 and per_group > 1)
