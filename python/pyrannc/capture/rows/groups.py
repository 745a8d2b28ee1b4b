"""Ops that treat each row by itself together, though not each of them.

A mixture of experts sorts all tokens by expert, and puts them back: inside, rows of the batch meet, and yet each row of
what comes out depends on that row alone. Such Ops stay Ops; what others use of them has its rows in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.facts import CALLS, memory
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.nodes.one_call import as_one_call
from pyrannc.capture.nodes.operands import written_memory
from pyrannc.capture.nodes.ops import closes_region, draws_random_numbers, is_tuple_access, opens_region
from pyrannc.capture.passes.clean import CleanGraph

from .trial import rows_shown

Known = Callable[[fx.Node], tuple[Tensor, bool] | None]
"""The tensor behind a placeholder or a constant, and whether it is a parameter; None for what has to be made up."""
Extents = Callable[[Tensor], list[Dim | None]]
"""The extents of a tensor; None for one that is no sum of rows and a number."""


@dataclass(frozen=True)
class RowGroup:
    """What one call of a sub-module runs.

    Attributes:
        path: of the sub-module.
        nodes: that depend on the batch.
        body: these, and what is made for them of parameters and sizes alone, in order.
        takes: what they read of others.
        gives: what others read of them.
    """

    path: str
    nodes: frozenset[fx.Node]
    body: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]

    def call(self, device: torch.device) -> Callable[..., Any]:
        """The group as a function of what it takes."""
        return as_one_call(self.body, self.takes, self.gives, device, "row_group")


def row_groups(cleaned: CleanGraph, paths: Sequence[str], extents: Extents) -> list[RowGroup]:
    """The calls of sub-modules that can be groups, of those of which each call can.

    What others read of one has its rows in dimension 0, and what it changes in place nobody else sees.

    Args:
        cleaned: a captured call.
        paths: of sub-modules.
        extents: of a tensor.
    """
    # How many rows there are is no secret.
    nodes = [node for node in cleaned.gm.graph.nodes if node not in cleaned.dims]
    dependent = _dependent(cleaned, nodes)
    # Positions and masks stay as they are made.
    given = dependent - made_without(cleaned.inputs, nodes)
    taken: set[fx.Node] = set()
    found = []
    for path in paths:
        calls = _calls(nodes, dependent, path)
        own = [_group(cleaned, nodes, given, members, path, extents) for members in calls if not members <= taken]
        if all(group is not None and taken.isdisjoint(group.nodes) for group in own):
            groups = [group for group in own if group is not None]
            found += groups
            taken.update(*(group.nodes for group in groups))
    return found


def _dependent(cleaned: CleanGraph, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What depends on the inputs of the call or on the number of rows; such a number itself is an argument."""
    found = {*cleaned.inputs, *(node for node, dim in cleaned.dims.items() if dim.per_row)}
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found.difference(cleaned.inputs, cleaned.dims)


def made_without(unknown: Collection[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What depends on none of some nodes, is not drawn, and stays as it is made."""
    others, depth = set(unknown), 0
    written = {storage for node in nodes for storage in written_memory(node)}
    for node in nodes:
        depth += opens_region(node)
        if (
            depth
            or draws_random_numbers(node)
            or not written.isdisjoint(memory(node))
            or not others.isdisjoint(node.all_input_nodes)
        ):
            others.add(node)
        depth -= closes_region(node)
    return set(nodes) - others


def _calls(nodes: Sequence[fx.Node], dependent: Collection[fx.Node], path: str) -> list[set[fx.Node]]:
    """What runs in each call of a sub-module."""
    members = defaultdict[int, set[fx.Node]](set)
    call_of: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op != "call_function" or node not in dependent:
            continue
        number = next((number for called, number in node.meta.get(CALLS, ()) if called == path), None)
        number = call_of.get(node.args[0]) if number is None and is_tuple_access(node) else number  # type: ignore[arg-type]  # it takes a node
        if number is not None:
            call_of[node] = number
            members[number].add(node)
    return list(members.values())


def _group(
    cleaned: CleanGraph,
    nodes: Sequence[fx.Node],
    given: Collection[fx.Node],
    members: set[fx.Node],
    path: str,
    extents: Extents,
) -> RowGroup | None:
    body, takes = with_what_they_need(cleaned, given, members)
    read = {operand for node in nodes if node not in members for operand in node.all_input_nodes}
    gives = [node for node in nodes if node in members and node in read]
    kept = [node for node in nodes if node in body]
    if (
        not gives
        or not all(_has_leading_rows(node, extents) for node in gives)
        or any(opens_region(node) or closes_region(node) for node in kept)
        or _comes_back(nodes, members)
        or _is_seen_outside(nodes, body, members, [node for node in takes if node not in cleaned.dims])
    ):
        return None
    return RowGroup(path, frozenset(members), tuple(kept), tuple(takes), tuple(gives))


def _has_leading_rows(node: fx.Node, extents: Extents) -> bool:
    made = node.meta.get("val")
    dims = extents(made) if isinstance(made, Tensor) else []
    return bool(dims) and dims[0] is not None and dims[0].per_row > 0


def _comes_back(nodes: Sequence[fx.Node], members: Collection[fx.Node]) -> bool:
    """True when others compute with what the members make, and the members with that."""
    after = set[fx.Node]()
    for node in nodes:
        if node in members:
            if not after.isdisjoint(node.all_input_nodes):
                return True
        elif any(operand in members or operand in after for operand in node.all_input_nodes):
            after.add(node)
    return False


def _is_seen_outside(
    nodes: Sequence[fx.Node], body: Collection[fx.Node], members: Collection[fx.Node], takes: Sequence[fx.Node]
) -> bool:
    """True when others see memory that the body changes, but for what members return, or change what it makes.

    Args:
        nodes: all but numbers of rows.
        body: of the group.
        members: of the group.
        takes: the tensors that it reads of others.
    """
    written = {storage for node in body for storage in written_memory(node)}
    if any(written & memory(node) for node in takes):
        return True
    made_once = {storage for node in body if node not in members for storage in memory(node)}
    others = [node for node in nodes if node not in body]
    if any(made_once & written_memory(node) for node in others):
        return True
    seen = set(nodes).difference(members)
    read = (operand for node in others for operand in node.all_input_nodes)
    return any(operand in seen and written & memory(operand) for operand in read)


def with_what_they_need(
    cleaned: CleanGraph, given: Collection[fx.Node], members: set[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes with all before them that is not given, and what these read."""
    body, takes, waiting = set(members), dict[fx.Node, None](), list(members)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand in body:
                continue
            if operand in given or operand in cleaned.dims or operand.op != "call_function":
                takes[operand] = None
            else:
                body.add(operand)
                waiting.append(operand)
    order = {node: place for place, node in enumerate(cleaned.gm.graph.nodes)}
    return body, sorted(takes, key=order.__getitem__)


class GroupTrials:
    """Tries groups, but of equal ones the first alone.

    Args:
        cleaned: the captured call.
        known: tells tensors.
        extents: of a tensor.
        rows: of the whole batch.
        attributes_restored: at its end, Python attributes of the model are as they were before the trace.
    """

    def __init__(
        self,
        cleaned: CleanGraph,
        known: Known,
        extents: Extents,
        rows: int,
        attributes_restored: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cleaned = cleaned
        self._known = known
        self._extents = extents
        self._rows = rows
        self._attributes_restored = attributes_restored
        self._found: dict[Hashable, int] = {}

    def rows_shown(self, group: RowGroup, device: torch.device) -> int:
        """With how many rows, at most, trials show that each random row is treated by itself; 0: with none."""
        calls: dict[torch.device, Callable[..., Any]] = {}

        def call(*operands: Any) -> Any:
            own = next(item.device for item in operands if isinstance(item, Tensor))
            if own not in calls:
                calls[own] = group.call(own)
            # What runs in it may set itself up by the first batch, which is none of the script's here.
            with self._attributes_restored():
                return calls[own](*operands)

        operands = [self._operand(node) for node in group.takes]
        title = group.call(torch.device("cpu")).title  # type: ignore[attr-defined]  # an OpaqueCall
        key = self._described(title, group)
        if key not in self._found:
            self._found[key] = rows_shown(call, operands, device, self._rows)
        return self._found[key]

    def _operand(self, node: fx.Node) -> Any:
        if node in self._cleaned.dims:
            return self._cleaned.dims[node]
        known = self._known(node)
        made = node.meta["val"] if known is None else known[0]
        return made, self._extents(node.meta["val"]), known is not None

    def _described(self, title: str, group: RowGroup) -> Hashable:
        """What a trial knows of a group; contents other than parameters' may count."""
        # The name of a call of the user does not tell what that computes.
        own = ((node, node.target) for node in group.body)
        unnamed = (node if call.does is None else call.does for node, call in own if isinstance(call, OpaqueCall))
        found: list[Hashable] = [title, *unnamed]
        for node in group.takes:
            if node in self._cleaned.dims:
                found.append(self._cleaned.dims[node])
                continue
            known, made = self._known(node), node.meta["val"]
            if known is not None and not known[1]:
                found.append(node)
            found.append((made.dtype, made.requires_grad, tuple(self._extents(made))))
        return tuple(found)
