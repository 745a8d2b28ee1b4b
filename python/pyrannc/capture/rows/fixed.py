"""Tensors that constants alone make, as the number of segments or classes is: they are the same at every call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.one_call import as_one_call
from pyrannc.capture.passes.clean import CleanGraph
from pyrannc.capture.torch_internals.operators import OpOverload

from .groups import made_without, with_what_they_need


class FixedTensors:
    """Knows those of a captured call.

    Args:
        cleaned: the captured call.
        constants: its constants.
    """

    def __init__(self, cleaned: CleanGraph, constants: Mapping[fx.Node, Tensor]) -> None:
        self._cleaned = cleaned
        self._constants = constants

    @cached_property
    def _nodes(self) -> set[fx.Node]:
        cleaned = self._cleaned
        nodes = list(cleaned.gm.graph.nodes)
        unknown = (node for node in nodes if node.op == "call_function" and not isinstance(node.target, OpOverload))
        return made_without({*cleaned.params, *cleaned.buffers, *cleaned.inputs, *cleaned.dims, *unknown}, nodes)

    def get(self, node: fx.Node) -> Tensor | None:
        """What a node gives at every call; None where that may differ."""
        if node in self._constants or node not in self._nodes:
            return self._constants.get(node)
        body, takes = with_what_they_need(self._cleaned, (), {node})
        given = [self._constants[constant] for constant in takes]
        device = given[0].device if given else torch.device("cpu")
        in_order = [item for item in self._cleaned.gm.graph.nodes if item in body]
        made: Tensor = as_one_call(in_order, takes, [node], device, "fixed")(*given)[0]
        return made
