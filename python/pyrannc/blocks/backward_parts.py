"""A Span's backward as two graphs: the gradients that other Spans wait for, and later those of parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import fx

from pyrannc.blocks.graphs import behind, named, results_in
from pyrannc.capture.torch_internals.compiler import parted
from pyrannc.capture.torch_internals.fakes import FakeTensorMode

Part = TypeVar("Part")
Other = TypeVar("Other")


@dataclass(frozen=True)
class BackwardParts(Generic[Part]):
    """A Span's backward, as graphs or as what these are compiled to.

    Attributes:
        first: takes what is kept and the gradients that come; gives those of ``early``, then what ``second`` takes.
        early: places of what comes into the Span.
        second: gives the gradients of ``late``; None where all come at once.
        late: places of what comes into the Span.
    """

    first: Part
    early: tuple[int, ...]
    second: Part | None = None
    late: tuple[int, ...] = ()

    def mapped(self, call: Callable[[Part], Other]) -> BackwardParts[Other]:
        """The same with other forms of its parts."""
        second = None if self.second is None else call(self.second)
        return BackwardParts(call(self.first), self.early, second, self.late)


def in_parts(
    backward: fx.GraphModule, differentiated: Sequence[int], may_wait: Sequence[bool], mode: FakeTensorMode
) -> BackwardParts[fx.GraphModule]:
    """Cuts a backward where some of its results may wait. What is cheap is computed twice rather than kept.

    Args:
        differentiated: the place of what comes into the Span, by result.
        may_wait: by such a place.
        mode: of the tensors in the graph.
    """
    early = tuple(place for place in differentiated if not may_wait[place])
    late = tuple(place for place in differentiated if may_wait[place])
    whole = BackwardParts(backward, tuple(differentiated))
    if not early or not late:
        return whole
    arguments = len(backward.graph.find_nodes(op="placeholder"))
    graph = named(backward, [f"kept_{place}" for place in range(arguments)])
    _part_convolutions(graph.graph)
    results = dict(zip(differentiated, results_in(graph), strict=True))
    graph.graph.output_node().args = ([results[place] for place in (*early, *late)],)
    at_once = behind([results[place] for place in early])
    behind_late = behind([results[place] for place in late])
    waiting = [node for node in behind_late if node not in at_once and not _is_there(node, at_once)]
    if not waiting:
        return whole
    graph.recompile()
    first, second = parted(graph, len(early), mode, waiting)
    return BackwardParts(first, early, second, late)


def _is_there(node: fx.Node, at_once: Container[fx.Node]) -> bool:
    """True for what nobody has to compute: an argument, or one of several results of what is computed at once."""
    return node.op == "placeholder" or (node.target is operator.getitem and node.args[0] in at_once)


def _part_convolutions(graph: fx.Graph) -> None:
    """Gives the gradients of inputs and of weights operators of their own: of one for both, none could wait."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        *others, (of_input, *of_weights) = node.args
        if not of_input or not any(of_weights):
            continue
        with graph.inserting_before(node):
            later = graph.node_copy(node)
        values = node.meta["val"]
        node.args, node.meta["val"] = (*others, [True, False, False]), (values[0], None, None)
        later.args, later.meta["val"] = (*others, [False, *of_weights]), (None, *values[1:])
        for user in list(node.users):
            if user.args[1] > 0:
                user.replace_input_with(node, later)
