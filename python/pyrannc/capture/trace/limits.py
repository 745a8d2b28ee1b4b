"""Limits that the forward sets to a parameter in place, as ``weight.data.clamp_(-1, 1)`` does.

One is no Op, which would run for each part of the batch, on each rank that holds the parameter. It depends on one
element at a time and does nothing the second time, so it is set once, before the call, where the parameter is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.facts import memory
from pyrannc.capture.nodes.operands import mutated_arguments
from pyrannc.capture.torch_internals.operators import OpOverload, schema

_LIMITS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"})
"""Operators that are limits where all but the first argument are plain numbers."""
_WHOLE_VIEWS = frozenset({"detach", "alias"})


@dataclass(frozen=True)
class Limit:
    """What a call sets before all else.

    Attributes:
        param: first name of the parameter.
        method: of its tensor.
        args: of the method.
        kwargs: likewise.
        past_autograd: the model sets it to ``param.data``, which autograd does not see.
    """

    param: str
    method: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    past_autograd: bool

    @torch.no_grad()
    def set(self, params: Mapping[str, Tensor]) -> None:
        """Sets it to the parameter that has its name."""
        param = params[self.param]
        getattr(param.data if self.past_autograd else param, self.method)(*self.args, **dict(self.kwargs))


def take_limits(graph: fx.Graph, names: Sequence[str]) -> list[Limit]:
    """Takes limits out of a raw trace, of those parameters that have one which comes before all that reads them.

    Args:
        graph: of the trace, whose first placeholders are the parameters.
        names: of these.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    holders = Counter(storage for holder in placeholders for storage in memory(holder))
    users = _users_of_changed(graph)
    found = []
    for name, param in zip(names, placeholders, strict=False):
        if any(holders[storage] > 1 for storage in memory(param)):
            continue
        setting = _setting([node for storage in memory(param) for node in users.get(storage, ())], param)
        limits = {_limit(name, node, param) for node in setting}
        limit = limits.pop() if len(limits) == 1 else None
        if limit is None:
            continue
        for node in setting:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]  # a node, as it is a limit
            graph.erase_node(node)
        found.append(limit)
    return found


def _users_of_changed(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By storage that something changes in place, the nodes that take what is in it, in their order."""
    changed = {storage for node in graph.nodes for operand in mutated_arguments(node) for storage in memory(operand)}
    users: dict[int, list[fx.Node]] = {storage: [] for storage in changed}
    for node in graph.nodes:
        for storage in {storage for operand in node.all_input_nodes for storage in memory(operand)} & changed:
            users[storage].append(node)
    return users


def _setting(users: Sequence[fx.Node], param: fx.Node) -> list[fx.Node]:
    """What changes a parameter, of the nodes that take it; nothing where something reads it before."""
    found: list[fx.Node] = []
    for node in users:
        if any(memory(operand) & memory(param) for operand in mutated_arguments(node)):
            found.append(node)
        elif not found and not _is_whole_view(node):
            return []
    return found


def _limit(name: str, node: fx.Node, param: fx.Node) -> Limit | None:
    """The limit that a node sets to the whole parameter; None for any other change."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    numbers = (*node.args[1:], *node.kwargs.values())
    if not _sets(node) or not all(isinstance(item, (int, float, type(None))) for item in numbers):
        return None
    viewed, past_autograd = node.args[0], False
    while viewed is not param and (_is_whole_view(viewed) or _sets(viewed)):
        past_autograd |= _is_whole_view(viewed)
        viewed = viewed.all_input_nodes[0]
    if viewed is not param:
        return None
    own = tuple(sorted(node.kwargs.items()))
    return Limit(name, _method(node), tuple(node.args[1:]), own, past_autograd)


def _sets(node: fx.Node) -> bool:
    return _method(node) in _LIMITS


def _is_whole_view(node: fx.Node) -> bool:
    return _method(node) in _WHOLE_VIEWS


def _method(node: fx.Node) -> str:
    return schema(node.target).name.removeprefix("aten::") if isinstance(node.target, OpOverload) else ""
