"""Ops that treat each row by itself together, though not each of them.

A mixture of experts sorts all tokens by expert, and puts them back: inside, rows of the batch meet, and yet each row of
what comes out depends on that row alone. Such Ops stay Ops; what others use of them has its rows in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .clean import CleanGraph, place_of
from .facts import memory
from .one_call import as_one_call, writes
from .ops import closes_region, is_tuple_access, opens_region
from .row_trial import is_row_wise

Known = Callable[[fx.Node], tuple[Tensor, bool] | None]
"""The tensor behind a placeholder or a constant, and whether it is a parameter; None for what has to be made up."""


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


def row_groups(cleaned: CleanGraph, paths: Sequence[str]) -> list[RowGroup]:
    """The calls of sub-modules of which nothing but results is used, and which change nothing of others.

    Args:
        cleaned: a captured call.
        paths: of sub-modules.
    """
    nodes = list(cleaned.gm.graph.nodes)
    dependent = _dependent(cleaned, nodes)
    taken: set[fx.Node] = set()
    found = []
    for path in paths:
        for members in _calls(nodes, dependent - taken, path):
            group = _group(cleaned, nodes, dependent, members, path)
            if group is not None:
                found.append(group)
                taken |= members
    return found


def _dependent(cleaned: CleanGraph, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What depends on the inputs of the call or on the number of rows; such a number itself is an argument."""
    found = {*cleaned.inputs, *(node for node, dim in cleaned.dims.items() if dim.per_row)}
    for node in nodes:
        if node not in cleaned.dims and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found.difference(cleaned.inputs, cleaned.dims)


def _calls(nodes: Sequence[fx.Node], dependent: Collection[fx.Node], path: str) -> Iterator[set[fx.Node]]:
    """The nodes of a sub-module, apart where others compute with what came before."""
    members, after = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        if node.op != "call_function" or node not in dependent:
            continue
        if _is_inside(place_of(node).module, path) or (is_tuple_access(node) and node.args[0] in members):
            if not after.isdisjoint(node.all_input_nodes):
                yield members
                members, after = set(), set()
            members.add(node)
        elif not members.isdisjoint(node.all_input_nodes) or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    if members:
        yield members


def _is_inside(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _group(
    cleaned: CleanGraph, nodes: Sequence[fx.Node], dependent: Collection[fx.Node], members: set[fx.Node], path: str
) -> RowGroup | None:
    body, takes = _with_what_they_need(cleaned, dependent, members)
    gives = [node for node in nodes if node in members and any(user not in members for user in node.users)]
    kept = [node for node in nodes if node in body]
    written = {storage for node in kept for storage in writes(node)}
    if (
        not gives
        or any(not isinstance(node.meta.get("val"), Tensor) for node in gives)
        or any(opens_region(node) or closes_region(node) for node in kept)
        or any(written & memory(node) for node in takes)
    ):
        return None
    return RowGroup(path, frozenset(members), tuple(kept), tuple(takes), tuple(gives))


def _with_what_they_need(
    cleaned: CleanGraph, dependent: Collection[fx.Node], members: set[fx.Node]
) -> tuple[set[fx.Node], list[fx.Node]]:
    """The nodes with all before them that depends on no batch, and what these read."""
    body, takes, waiting = set(members), dict[fx.Node, None](), list(members)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand in body:
                continue
            if operand in dependent or operand in cleaned.dims or operand.op != "call_function":
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
    """

    def __init__(self, cleaned: CleanGraph, known: Known, extents: Callable[[Tensor], list[Any]]) -> None:
        self._cleaned = cleaned
        self._known = known
        self._extents = extents
        self._found: dict[Hashable, bool] = {}

    def show(self, group: RowGroup, device: torch.device) -> bool:
        """True when trials with random rows show that each row is treated by itself."""
        calls: dict[torch.device, Callable[..., Any]] = {}

        def call(*operands: Any) -> Any:
            own = next(item.device for item in operands if isinstance(item, Tensor))
            if own not in calls:
                calls[own] = group.call(own)
            return calls[own](*operands)

        operands = [self._operand(node) for node in group.takes]
        title = group.call(torch.device("cpu")).title  # type: ignore[attr-defined]  # an OpaqueCall
        key = self._described(title, group)
        if key is None:
            return is_row_wise(call, operands, device)
        if key not in self._found:
            self._found[key] = is_row_wise(call, operands, device)
        return self._found[key]

    def _operand(self, node: fx.Node) -> Any:
        if node in self._cleaned.dims:
            return self._cleaned.dims[node]
        known = self._known(node)
        made = node.meta["val"] if known is None else known[0]
        return made, self._extents(node.meta["val"]), known is not None

    def _described(self, title: str, group: RowGroup) -> Hashable | None:
        """What a trial knows of a group; None where contents other than parameters' may count."""
        found: list[Hashable] = [title]
        for node in group.takes:
            if node in self._cleaned.dims:
                found.append(self._cleaned.dims[node])
                continue
            known, made = self._known(node), node.meta["val"]
            if known is not None and not known[1]:
                return None
            found.append((made.dtype, made.requires_grad, tuple(self._extents(made))))
        return tuple(found)
