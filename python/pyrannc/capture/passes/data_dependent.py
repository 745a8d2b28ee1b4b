"""Ops among which extents or numbers depend on data: they stay together as one opaque Op.

``x[mask]``, ``nonzero``, ``.item()`` and the like make tensors whose extents only the data tell, which no Graph holds.
All Ops from there to where extents are known again become one function, which runs them as they are.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import AffineReader
from pyrannc.capture.nodes.facts import CALLS, FACTS, GRAD_ENABLED, PLACE, TensorFacts, memory
from pyrannc.capture.nodes.form import Form
from pyrannc.capture.nodes.one_call import as_one_call
from pyrannc.capture.nodes.operands import mutated_arguments, written_memory
from pyrannc.capture.nodes.ops import aliased_arguments, closes_region, opens_region
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

from .boundaries import own_boundaries


class ReturnedExtentsError(CaptureError):
    """The model returns a tensor whose extents depend on data.

    Attributes:
        origins: where these extents come from.
    """

    def __init__(self, message: str, origins: frozenset[Place]) -> None:
        super().__init__(message)
        self.origins = origins


def keep_together(graph: fx.Graph, inputs: Sequence[fx.Node], reader: AffineReader, device: torch.device) -> None:
    """Rewrites a flat graph of calls so that each tensor and number left has extents that are known for any batch.

    Args:
        graph: may get another order.
        inputs: the placeholders of the call's arguments.
        reader: tells what is known.
        device: where the trace ran; every device that the model named is replaced by it.

    Raises:
        ReturnedExtentsError: the model returns a tensor whose extents depend on data.
    """
    boundaries = own_boundaries(graph, inputs, reader)
    unknown = {node for node in graph.nodes if node.op == "call_function" and _is_unknown(node, reader)} | boundaries
    if not unknown:
        return
    for node in unknown:
        if any(user.op == "output" for user in node.users):
            raise ReturnedExtentsError(
                f"{node.meta.get(PLACE) or Place('')} makes a tensor whose extents depend on data, and the model "
                "returns it: each part of a batch would give another one; return it with extents that do not, such as "
                "the full tensor beside a mask",
                _origins(node, unknown),
            )
    _share_views(graph, unknown - boundaries)
    groups = _Groups(graph, unknown)
    order = groups.order()
    for root, members in groups.to_replace():
        order[root] = _replaced(graph, members, unknown, reader, device)
    _reorder(graph, [node for root in order for node in order[root]])


def _origins(node: fx.Node, unknown: Set[fx.Node]) -> frozenset[Place]:
    """Where what a node is made of first has extents that depend on data."""
    found, waiting = dict.fromkeys([node]), [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand in unknown and operand not in found:
                found[operand] = None
                waiting.append(operand)
    first = (item for item in found if unknown.isdisjoint(item.all_input_nodes))
    return frozenset(item.meta.get(PLACE) or Place("") for item in first)


def _is_unknown(node: fx.Node, reader: AffineReader) -> bool:
    """True for what a Graph has no form for: a number, or a tensor with an extent, that depends on data."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLIC):
        return reader.read(value) is None
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return any(reader.read(size) is None for tensor in tensors if isinstance(tensor, Tensor) for size in tensor.shape)


def _share_views(graph: fx.Graph, unknown: set[fx.Node]) -> None:
    """Gives equal views of a mask or of indices as one: made-up ones would not go together."""
    known: dict[str, fx.Node] = {}
    near = unknown | {user for node in unknown for user in node.users}
    for node in [node for node in graph.nodes if node in near]:
        for operand in node.all_input_nodes:
            made = operand.meta.get("val")
            whole = not isinstance(made, Tensor) or made.is_floating_point() or made.is_complex()
            if not whole and aliased_arguments(operand) and not mutated_arguments(operand):
                first = known.setdefault(repr((operand.target, operand.args, operand.kwargs)), operand)
                node.replace_input_with(operand, first)


class _Groups:
    """Nodes that stay together, by union and find. Others may stand between none of a group's."""

    def __init__(self, graph: fx.Graph, unknown: set[fx.Node]) -> None:
        self._nodes: list[fx.Node] = list(graph.nodes)
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._unknown = unknown
        self._root: dict[fx.Node, fx.Node] = {node: node for node in self._nodes}
        self._touching: dict[int, list[fx.Node]] = defaultdict(list)
        self._written: set[int] = set()
        for node in self._calls():
            for storage in {place for item in (node, *node.all_input_nodes) for place in memory(item)}:
                self._touching[storage].append(node)
            self._written.update(written_memory(node))
        self._join_regions()
        for node in unknown:
            self._join(node, *node.users)
        self._before = self._order_of_pairs()
        self._close()

    def _calls(self) -> Iterator[fx.Node]:
        return (node for node in self._nodes if node.op == "call_function")

    def _find(self, node: fx.Node) -> fx.Node:
        while self._root[node] is not node:
            self._root[node] = self._root[self._root[node]]
            node = self._root[node]
        return node

    def _join(self, *nodes: fx.Node) -> bool:
        roots = sorted({self._find(node) for node in nodes}, key=self._place.__getitem__)
        for root in roots[1:]:
            self._root[root] = roots[0]
        return len(roots) > 1

    def _join_regions(self) -> None:
        """An autocast block or a vmap level stays in one piece."""
        depth, opened = 0, self._nodes[0]
        for node in self._calls():
            if opens_region(node):
                opened = opened if depth else node
                depth += 1
            if depth:
                self._join(opened, node)
            depth -= closes_region(node)

    def _order_of_pairs(self) -> dict[fx.Node, set[fx.Node]]:
        """What must stand before each node: its operands, and where memory changes whoever has touched it before."""
        before = {node: set(node.all_input_nodes) for node in self._nodes}
        for storage in self._written:
            last_writer, readers = None, list[fx.Node]()
            for node in self._touching[storage]:
                if last_writer is not None:
                    before[node].add(last_writer)
                if storage in written_memory(node):
                    before[node].update(readers)
                    last_writer, readers = node, []
                else:
                    readers.append(node)
        return before

    def _members(self) -> dict[fx.Node, list[fx.Node]]:
        members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self._nodes:
            members[self._find(node)].append(node)
        return members

    def _close(self) -> None:
        """Joins what has to be joined until no group needs what needs the group."""
        while self._join_results() or self._join_writers() or self._join_cycle():
            pass

    def to_replace(self) -> list[tuple[fx.Node, list[fx.Node]]]:
        """The groups in which something is not known."""
        return [(root, nodes) for root, nodes in self._members().items() if not self._unknown.isdisjoint(nodes)]

    def _join_results(self) -> bool:
        """What an Op with several results gives cannot leave a group as a whole."""
        found = [
            self._join(node, *node.users)
            for _, nodes in self.to_replace()
            for node in nodes
            if isinstance(node.meta.get("val"), (list, tuple))
        ]
        return any(found)

    def _join_writers(self) -> bool:
        """Memory that a group changes is the group's own, or a buffer's."""
        found = []
        for _, nodes in self.to_replace():
            written = {storage for node in nodes for storage in written_memory(node)}
            touching = [node for storage in written for node in self._touching[storage]]
            found.append(bool(touching) and self._join(nodes[0], *touching))
        return any(found)

    def _edges(self) -> dict[fx.Node, set[fx.Node]]:
        edges: dict[fx.Node, set[fx.Node]] = {self._find(node): set() for node in self._nodes}
        for node, earlier in self._before.items():
            root = self._find(node)
            edges[root].update(other for item in earlier if (other := self._find(item)) is not root)
        return edges

    def _join_cycle(self) -> bool:
        try:
            TopologicalSorter(self._edges()).prepare()
        except CycleError as error:
            return self._join(*error.args[1])
        return False

    def order(self) -> dict[fx.Node, list[fx.Node]]:
        """The groups, each after those that it needs, else as they stood."""
        edges, members = self._edges(), self._members()
        needed_by: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for root, earlier in edges.items():
            for other in earlier:
                needed_by[other].append(root)
        waiting = {root: len(earlier) for root, earlier in edges.items()}
        # Placeholders stay first, outputs last.
        rank = {root: (root.op == "output", root.op != "placeholder", self._place[root]) for root in edges}
        ready = [(rank[root], root) for root in edges if not waiting[root]]
        heapq.heapify(ready)
        found: dict[fx.Node, list[fx.Node]] = {}
        while ready:
            _, root = heapq.heappop(ready)
            found[root] = members[root]
            for later in needed_by[root]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, (rank[later], later))
        return found


def _without(graph: fx.Graph, group: Sequence[fx.Node]) -> list[fx.Node]:
    for node in reversed(group):
        graph.erase_node(node)
    return []


def _replaced(
    graph: fx.Graph, group: Sequence[fx.Node], unknown: set[fx.Node], reader: AffineReader, device: torch.device
) -> list[fx.Node]:
    """One node in the place of a group, and what reads its results from it."""
    inside = set(group)
    given = [node for node in group if node not in unknown and any(user not in inside for user in node.users)]
    place = next(node.meta.get(PLACE) or Place("") for node in group if node in unknown)
    return replaced_by_one(graph, group, given, place, "data_dependent", reader, device)


def replaced_by_one(
    graph: fx.Graph,
    group: Sequence[fx.Node],
    given: Sequence[fx.Node],
    place: Place,
    kind: str,
    reader: AffineReader,
    device: torch.device,
) -> list[fx.Node]:
    """One node, where nodes are made now, in the place of a group, and what reads its results from it.

    Args:
        graph: that has them.
        group: nodes in order.
        given: those whose results others use.
        place: in the model.
        kind: for the name.
        reader: tells extents.
        device: where the trace ran.
    """
    inside = set(group)
    taken = list(dict.fromkeys(operand for node in group for operand in node.all_input_nodes if operand not in inside))
    target = as_one_call(group, taken, given, device, kind)
    results = [node.meta["val"] for node in given]
    target.form = Form.of([node.meta.get("val") for node in taken], results, reader, "a part of the model")
    if not given and not target.changes:
        return _without(graph, group)
    whole = graph.call_function(target, tuple(taken))
    whole.meta = {
        "val": tuple(node.meta["val"] for node in given),
        FACTS: {number: found for number, node in enumerate(given) if (found := _facts(node)) is not None},
        PLACE: place,
        CALLS: _common([node.meta.get(CALLS, ()) for node in group]),
        GRAD_ENABLED: True,
    }
    nodes = [whole]
    for number, node in enumerate(given):
        result = graph.call_function(operator.getitem, (whole, number))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
        nodes.append(result)
    _without(graph, group)
    return nodes


def _facts(node: fx.Node) -> TensorFacts | None:
    facts: TensorFacts | None = node.meta.get(FACTS, {}).get(None)
    return facts


def _reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    last = order[0]
    for node in order[1:]:
        last.append(node)
        last = node


def _common(calls: Sequence[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...]:
    """The calls of sub-modules that are round all."""
    alike = takewhile(lambda level: len(set(level)) == 1, zip(*calls, strict=False))
    return tuple(level[0] for level in alike)
