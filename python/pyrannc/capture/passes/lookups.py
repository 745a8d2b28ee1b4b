"""Levels of ``torch.vmap`` in which elements are looked up by their numbers, as where attention masks are made.

No rule for rows follows the numbers of rows into such a level. With what makes these it becomes one function, of which
trials tell whether it treats each row by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import AffineReader
from pyrannc.capture.nodes.facts import FACTS, PLACE, memory
from pyrannc.capture.nodes.operands import mutated_arguments, written_memory
from pyrannc.capture.nodes.ops import closes_region, draws_random_numbers, opens_region
from pyrannc.capture.torch_internals.operators import ENTER_AUTOCAST, OpOverload
from pyrannc.capture.user.source import Place

from .data_dependent import replaced_by_one

_LOOKUP = torch.ops.aten.index.Tensor


def join_lookups(graph: fx.Graph, reader: AffineReader, device: torch.device) -> None:
    """Rewrites a flat graph of calls.

    Args:
        graph: the calls.
        reader: tells extents.
        device: where the trace ran.
    """
    written = {storage for node in graph.nodes for storage in written_memory(node)}
    for level in list(_levels(graph)):
        given = [node for node in level if any(user not in level for user in node.users)]
        plain = all(map(_is_plain, given)) and not any(map(_is_more, level))
        if plain and _looks_up_rows(level, reader):
            with graph.inserting_before(level[0]):
                group = [*_with_numbers(graph, level, written), *level]
                replaced_by_one(graph, group, given, level[0].meta.get(PLACE) or Place(""), "lookup", reader, device)


def _looks_up_rows(level: Sequence[fx.Node], reader: AffineReader) -> bool:
    """True where elements of a tensor that has rows, and comes from outside, are chosen."""
    sources = (node.all_input_nodes[0].meta["val"] for node in level if node.target is _LOOKUP)
    extents = (reader.read(size) for source in sources for size in source.shape)
    return any(extent is not None and extent.per_row for extent in extents)


def _levels(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each outermost level, in order."""
    depth, found = 0, list[fx.Node]()
    for node in graph.nodes:
        depth += opens_region(node)
        if depth:
            found.append(node)
        depth -= closes_region(node)
        if found and not depth:
            if found[0].target is not ENTER_AUTOCAST:
                yield found
            found = []


def _is_plain(node: fx.Node) -> bool:
    """True for a tensor without gradient."""
    facts = node.meta.get(FACTS, {}).values()
    return isinstance(node.meta.get("val"), Tensor) and not any(found.requires_grad for found in facts)


def _is_more(node: fx.Node) -> bool:
    """True for an Op that draws or changes something."""
    return bool(mutated_arguments(node)) or draws_random_numbers(node)


def _with_numbers(graph: fx.Graph, level: Sequence[fx.Node], written: set[int]) -> list[fx.Node]:
    """Copies, for the level alone, of what it takes that is made of sizes alone and stays as it is made."""
    copies: dict[fx.Node, fx.Node | None] = {}
    made: list[fx.Node] = []

    def copied(node: fx.Node) -> fx.Node | None:
        if node not in copies:
            copies[node] = None
            operands = [item for item in node.all_input_nodes if isinstance(item.meta.get("val"), Tensor)]
            own = isinstance(node.target, OpOverload) and _is_plain(node) and not _is_more(node)
            if own and written.isdisjoint(memory(node)) and all(map(copied, operands)):
                made.append(graph.node_copy(node, lambda item: copies.get(item) or item))
                copies[node] = made[-1]
        return copies[node]

    for node in level:
        for operand in [item for item in node.all_input_nodes if item not in level]:
            if (own := copied(operand)) is not None:
                node.replace_input_with(operand, own)
    return made
