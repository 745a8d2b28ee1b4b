"""Boundaries: what integers of the batch alone make, and what tells where rows begin, such as ``cu_seqlens``.

They count over all rows, so that what uses them would have to see all rows too. Each user gets boundaries of its own,
which are made of the rows that it has; no gradient flows through them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg

from pyrannc.capture.nodes.dims import AffineReader
from pyrannc.capture.nodes.facts import memory
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.nodes.operands import mutated_arguments, written_memory
from pyrannc.capture.nodes.ops import closes_region, draws_random_numbers, opens_region
from pyrannc.capture.torch_internals.symbols import SYMBOLIC


def own_boundaries(graph: fx.Graph, inputs: Sequence[fx.Node], reader: AffineReader) -> set[fx.Node]:
    """Gives each user of boundaries its own.

    Args:
        graph: a flat graph of calls.
        inputs: the placeholders of the call's arguments.
        reader: tells extents.

    Returns:
        The nodes of all copies, each of which stays with its user.
    """
    found, alone = _boundaries(graph, inputs, reader)
    originals, copied = set[fx.Node](), set[fx.Node]()
    users = [node for node in graph.nodes if node.op == "call_function" and node not in found]
    for user in users:
        if found.isdisjoint(user.all_input_nodes):
            continue
        needed = _needed(user, found, alone)
        originals.update(needed)
        copied.update(_with_own(user, needed))
    for node in reversed(list(graph.nodes)):
        if node in originals and not node.users:
            graph.erase_node(node)
    return copied


def _with_own(user: fx.Node, boundaries: Sequence[fx.Node]) -> list[fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}

    def copy_of(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    for node in boundaries:
        with user.graph.inserting_before(user):
            copies[node] = user.graph.node_copy(node, copy_of)
        copies[node].meta = node.meta
    user.args, user.kwargs = map_arg((user.args, user.kwargs), copy_of)
    return list(copies.values())


def _boundaries(graph: fx.Graph, inputs: Sequence[fx.Node], reader: AffineReader) -> tuple[set[fx.Node], set[fx.Node]]:
    """What has extents that are no multiples of the rows, or such operands, and all that is made of integers alone."""
    written = {place for node in graph.nodes if node.op == "call_function" for place in written_memory(node)}
    of_rows = {node for node in inputs if _is_integer_with_rows(node, reader)}
    alone, found = set(of_rows), set[fx.Node]()
    depth = 0
    for node in graph.nodes:
        operands = node.all_input_nodes
        depth += opens_region(node)
        inside, depth = depth > 0, depth - closes_region(node)
        if (
            inside
            or node.op != "call_function"
            or not all(_is_idle(operand) or operand in alone for operand in operands)
        ):
            continue
        if not _gives_the_same_again(node) or written & memory(node):
            continue
        alone.add(node)
        if of_rows.isdisjoint(operands):
            continue
        of_rows.add(node)
        if not found.isdisjoint(operands) or _is_uneven(node.meta.get("val"), reader):
            found.add(node)
    return found, alone


def _is_integer_with_rows(node: fx.Node, reader: AffineReader) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype.is_floating_point or value.dtype.is_complex or not value.dim():
        return False
    extent = reader.read(value.shape[0])
    return extent is not None and extent.per_row > 0


def _is_idle(node: fx.Node) -> bool:
    """True for a constant without gradients."""
    return node.op == "get_attr" and not getattr(node.meta.get("val"), "requires_grad", True)


def _gives_the_same_again(node: fx.Node) -> bool:
    if isinstance(node.target, OpaqueCall):
        return node.target.repeats
    return not draws_random_numbers(node) and not mutated_arguments(node)


def _is_uneven(value: Any, reader: AffineReader) -> bool:
    """True for what has an extent that is no multiple of the rows, though it depends on them or on data."""
    if isinstance(value, SYMBOLIC):
        return reader.read(value) is None
    tensors = value if isinstance(value, (list, tuple)) else [value]
    extents = [reader.read(size) for item in tensors if isinstance(item, Tensor) for size in item.shape]
    return any(extent is None or (extent.per_row and extent.fixed) for extent in extents)


def _needed(user: fx.Node, found: Collection[fx.Node], alone: Collection[fx.Node]) -> list[fx.Node]:
    """The boundaries that a node uses, and the calls that they are made of, in order."""
    needed, waiting = set[fx.Node](), [operand for operand in user.all_input_nodes if operand in found]
    while waiting:
        node = waiting.pop()
        needed.add(node)
        waiting += [operand for operand in node.all_input_nodes if operand in alone and operand.op == "call_function"]
    return [node for node in user.graph.nodes if node in needed]
