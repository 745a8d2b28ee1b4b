"""What an operator is given, and what of it it changes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from pyrannc.capture.torch_internals.operators import OpOverload, schema

from .facts import memory

# Their schemas do not say that running statistics are written: op -> flag that says so.
_UPDATES_RUNNING_STATS = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of an ATen op by schema name, defaults included."""
    assert isinstance(node.target, OpOverload)
    return named_arguments(node.target, node.args, node.kwargs)


def named_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op is given by schema name, defaults included."""
    named: dict[str, Any] = {}
    for place, argument in enumerate(schema(op).arguments):
        if argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif place < len(args) and not argument.kwarg_only:
            named[argument.name] = args[place]
        else:
            named[argument.name] = argument.default_value
    return named


def written_arguments(op: OpOverload, named: Mapping[str, Any]) -> list[Any]:
    """What an op writes in place by its schema, of what it is given by name."""
    written = (item for item in schema(op).arguments if item.alias_info is not None and item.alias_info.is_write)
    return [named[item.name] for item in written]


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The tensors that the node writes in place."""
    changes: Sequence[int] = getattr(node.target, "changes", ())
    if changes:
        return nodes_in([node.args[place] for place in changes])
    if not isinstance(node.target, OpOverload):
        return []
    written = schema(node.target)
    flag = _UPDATES_RUNNING_STATS.get(written.name)
    if flag is None and not written.is_mutable:
        return []
    named = arguments(node)
    mutated = nodes_in(written_arguments(node.target, named))
    if flag is not None and named[flag]:
        mutated.extend(nodes_in([named["running_mean"], named["running_var"]]))
    return mutated


def written_memory(node: fx.Node) -> set[int]:
    """The storages that a node changes in place."""
    return {storage for operand in mutated_arguments(node) for storage in memory(operand)}


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes in an argument, which may be a list."""
    if isinstance(argument, fx.Node):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [node for item in argument for node in nodes_in(item)]
    return []
