"""Questions about data as small functions of a call's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pyrannc.capture.reads.assumptions import HeldBuffer, Question
from pyrannc.capture.torch_internals.operators import OpOverload, schema
from pyrannc.capture.torch_internals.symbols import SYMBOLIC

from .facts import memory
from .operands import written_memory

_KEPT_ANSWERS = 256


class NotOfInputsError(LookupError):
    """The question is not one about inputs and known buffers alone."""


def question(
    expr: sympy.Basic,
    answer: sympy.Basic,
    slices: Mapping[sympy.Symbol, tuple[Sequence[fx.Node], Callable[[Any], Any]]],
    inputs: Mapping[fx.Node, int],
    constant: Callable[[fx.Node], Any],
    device: torch.device,
    buffers: Mapping[fx.Node, HeldBuffer] | None = None,
) -> Question | None:
    """The question whether ``expr`` has the value ``answer``; None when other than inputs and ``buffers`` decides.

    Args:
        slices: for each symbol, the nodes that lead to it, in graph order, and how to read it from the last of them.
        inputs: the input that a placeholder stands for.
        constant: the tensor of a ``get_attr`` node.
        device: that inputs are on.
        buffers: by placeholder, those that may decide.
    """
    sources: dict[fx.Node, int | HeldBuffer] = {**inputs, **(buffers or {})}
    try:
        functions = [_function(nodes, sources, constant, device) for nodes, _ in slices.values()]
    except NotOfInputsError:
        return None
    readers = [read for _, read in slices.values()]

    def ask(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [
            function(*[tensors[source] if isinstance(source, int) else source.now() for source in taken])
            for function, taken in functions
        ]

    @lru_cache(_KEPT_ANSWERS)
    def decided(numbers: tuple[float, ...]) -> bool:
        asked = zip(slices, readers, numbers, strict=True)
        # To sympy 1.0 is not 1.
        values = {symbol: read(int(number) if symbol.is_integer else number) for symbol, read, number in asked}
        return bool(expr.subs(values) == answer)

    taken = [source for _, sources in functions for source in sources]
    takes = frozenset(source for source in taken if isinstance(source, int))
    held = tuple(source for source in taken if isinstance(source, HeldBuffer))
    return Question(ask, lambda numbers: decided(tuple(numbers)), takes, held)


def _function(
    nodes: Sequence[fx.Node],
    sources: Mapping[fx.Node, int | HeldBuffer],
    constant: Callable[[fx.Node], Any],
    device: torch.device,
) -> tuple[fx.GraphModule, list[int | HeldBuffer]]:
    """What leads to the element that the last node reads, and the inputs and buffers that it takes."""
    *rest, last = nodes
    if not (isinstance(last.target, OpOverload) and schema(last.target).name in ("aten::item", "aten::is_nonzero")):
        raise NotOfInputsError
    graph, owner = fx.Graph(), nn.Module()
    copies: dict[fx.Node, fx.Node] = {}
    taken: list[int | HeldBuffer] = []

    def argument(item: Any) -> Any:
        if isinstance(item, SYMBOLIC):
            raise NotOfInputsError
        return device if isinstance(item, torch.device) else copies[item] if isinstance(item, fx.Node) else item

    written = _written_alone(rest)
    for node in rest:
        if node.op == "placeholder":
            if node not in sources:
                raise NotOfInputsError
            taken.append(sources[node])
            given = graph.placeholder(node.name)
            # What the forward writes into it is for the forward itself to write.
            copies[node] = graph.call_function(torch.clone, (given,)) if memory(node) & written else given
        elif node.op == "get_attr":
            owner.register_buffer(node.name, constant(node))
            copies[node] = graph.get_attr(node.name)
        else:
            if _draws(node):
                raise NotOfInputsError
            args, kwargs = map_aggregate(node.args, argument), map_aggregate(node.kwargs, argument)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
    graph.output(copies[last.all_input_nodes[0]])
    return fx.GraphModule(owner, graph), taken


def _written_alone(nodes: Sequence[fx.Node]) -> set[int]:
    """The storages that some nodes change in place, of which each is that of one input or buffer at most.

    Raises:
        NotOfInputsError: what else has such a storage would not see what is written into a copy.
    """
    written = {place for node in nodes for place in written_memory(node)}
    given = [(node.op, place) for node in nodes if node.op != "call_function" for place in memory(node) & written]
    if any(op == "get_attr" for op, _ in given) or len(given) > len(set(given)):
        raise NotOfInputsError
    return written


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        # Sizes and their arithmetic; what else stands here was not captured inside.
        return not getattr(target, "__module__", "").endswith("operator")
    return torch.Tag.nondeterministic_seeded in target.tags
