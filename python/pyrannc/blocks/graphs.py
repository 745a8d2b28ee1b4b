"""What is done to graphs of ATen operators before they are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pyrannc.capture.torch_internals.fakes import FakeTensorMode

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_VIEWS = (
    _aten.permute.default,
    _aten.view.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.as_strided.default,
)


class NotCompilable(Exception):
    """Why a Span stays as it is."""


def named(graph: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy with these names of its arguments, without Ops that do nothing."""
    made = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        copies[node] = made.placeholder(name)
        copies[node].meta = dict(node.meta)
    made.output(made.graph_copy(graph.graph, copies))
    for node in list(made.nodes):
        if node.target in _SAME:
            node.replace_all_uses_with(node.all_input_nodes[0])
            made.erase_node(node)
    return fx.GraphModule(graph, made)


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Another with the same Ops."""
    made = fx.Graph()
    made.output(made.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, made)


def take_changes_out(graph: fx.GraphModule, made: int, takes: int) -> list[int]:
    """New contents of arguments come out behind what is made.

    Args:
        made: how many results come first.
        takes: how many arguments may be changed.

    Returns:
        Places of the arguments.

    Raises:
        NotCompilable: others are changed, or one several times.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    changed: list[int] = []
    contents: list[Any] = []
    for node in list(graph.graph.nodes):
        if node.target is _aten.copy_.default and node.args[0] in placeholders:
            changed.append(placeholders.index(node.args[0]))
            contents.append(node.args[1])
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
    if any(place >= takes for place in changed):
        raise NotCompilable("it changes in place what it has drawn")
    if len(set(changed)) < len(changed):
        raise NotCompilable("it changes an argument several times")
    results = results_in(graph)
    graph.graph.output_node().args = ([*results[:made], *contents, *results[made:]],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return changed


def keep_arguments_whole(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Keeps arguments instead of views of them: autograd then sees whether they change before the backward.

    Args:
        results: how many of the forward's results come before what is kept.
    """
    outputs = results_in(forward)
    kept = list(outputs[results:])
    arguments = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    there = [node for node in arguments.values() if "tangents" not in node.name]
    for node, argument in zip(list(kept), there, strict=True):
        chain = _views_of_argument(node)
        if not chain:
            continue
        whole = chain[0].all_input_nodes[0]
        if whole.name in arguments:
            kept.remove(node)
        else:
            with backward.graph.inserting_before(argument):
                arguments[whole.name] = backward.graph.placeholder(whole.name)
            arguments[whole.name].meta = dict(whole.meta)
            kept[kept.index(node)] = whole
        made: Any = arguments[whole.name]
        with backward.graph.inserting_before(first):
            for view in chain:
                made = backward.graph.call_function(view.target, (made, *view.args[1:]), dict(view.kwargs))  # type: ignore[arg-type]  # it is an operator
                made.meta = dict(view.meta)
        argument.replace_all_uses_with(made)
        backward.graph.erase_node(argument)
    forward.graph.output_node().args = ([*outputs[:results], *kept],)
    for graph in (forward, backward):
        graph.graph.eliminate_dead_code()
        graph.recompile()


def lay_out(backward: fx.GraphModule, strides: Sequence[tuple[int, ...] | None], mode: FakeTensorMode) -> None:
    """What is kept comes as the forward's kernels lay it out, which may choose other strides than the operators.

    Args:
        strides: of what is kept, in order, as far as known.
    """
    for node, stride in zip(backward.graph.find_nodes(op="placeholder"), strides, strict=False):
        before = node.meta["val"]
        if stride is not None and before.stride() != tuple(stride):
            with mode:
                made = torch.empty_strided(before.shape, tuple(stride), dtype=before.dtype, device=before.device)
            node.meta["val"] = made


def results_in(graph: fx.GraphModule) -> list[Any]:
    """What a graph gives."""
    results: Any = graph.graph.output_node().args[0]
    return list(results)


def _views_of_argument(node: Any) -> list[fx.Node]:
    """The views, first to last, by which an argument becomes what is kept; none where it is something else."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target not in _VIEWS or len(node.all_input_nodes) != 1:
            return []
        chain.append(node)
        node = node.all_input_nodes[0]
    return chain[::-1] if chain and node.op == "placeholder" else []


def behind(results: Sequence[Any]) -> dict[fx.Node, None]:
    """All that some results are computed from, themselves included."""
    found: dict[fx.Node, None] = {}
    left = [result for result in results if isinstance(result, fx.Node)]
    while left:
        node = left.pop()
        if node not in found:
            found[node] = None
            left.extend(node.all_input_nodes)
    return found
