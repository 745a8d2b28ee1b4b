"""Replaces in-place ops by their functional twins where the model cannot tell the difference.

``relu_`` after a convolution, or ``out += identity`` in a residual network, would tie long chains of ops to one
stage because they share a storage. If nothing reads the old contents of the storage later on, the functional op
gives the same numbers and gradients, and frees the ops from each other. User inputs are not written any more.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.facts import FACTS, GRAD_ENABLED, TensorFacts
from pyrannc.capture.nodes.operands import mutated_arguments
from pyrannc.capture.torch_internals.operators import OpOverload, overload_name, schema

_WITHOUT_DERIVATIVE = frozenset({"bernoulli_", "copy_", "resize_", "set_"})
"""Torch has none for their functional twins."""


def replace_in_place_ops(graph: fx.Graph, fixed: set[fx.Node]) -> None:
    """Rewrites ``graph``. Storages of the nodes in ``fixed`` (parameters, buffers, constants) are left alone."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for facts in node.meta.get(FACTS, {}).values():
            if facts.storage is not None:
                members[facts.storage].append(node)
    fresh_storage = -1
    for node in graph.nodes:
        twin = _functional_twin(node)
        storage = _storage(node)
        if twin is None or storage is None:
            continue
        earlier = [member for member in members[storage] if order[member] < order[node]]
        read_later = any(order[user] > order[node] for member in earlier for user in member.users)
        if read_later or not fixed.isdisjoint(earlier):
            continue
        node.target = twin
        later = members.pop(storage)[len(earlier) :]
        members[storage] = earlier
        members[fresh_storage] = later
        for member in later:
            _move(member, storage, fresh_storage)
        fresh_storage -= 1


def _functional_twin(node: fx.Node) -> OpOverload | None:
    """The op that returns what ``node`` writes, if they agree for these operands."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    name, overload = schema(target).name.removeprefix("aten::"), overload_name(target)
    written = mutated_arguments(node)
    if not name.endswith("_") or target.namespace != "aten" or len(written) != 1 or written[0] is not node.args[0]:
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None or overload not in packet.overloads():
        return None
    twin: OpOverload = getattr(packet, overload)
    same_arguments = [a.name for a in schema(twin).arguments] == [a.name for a in schema(target).arguments]
    is_view = any(result.alias_info is not None for result in schema(twin).returns)
    if not same_arguments or is_view or not _keeps_type_and_gradient(node, name, written[0]):
        return None
    return twin


def _keeps_type_and_gradient(node: fx.Node, name: str, written: fx.Node) -> bool:
    value, before = node.meta.get("val"), written.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(before, Tensor):
        return False
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    # Indices and masks leave the type of what they choose from.
    types = {operand.dtype for operand in operands if isinstance(operand, Tensor)}
    if any(torch.promote_types(kind, value.dtype) != value.dtype for kind in types):
        return False
    # Without gradients, an in-place op keeps the history of what it writes; a functional one drops it.
    facts: TensorFacts | None = written.meta.get(FACTS, {}).get(None)
    own: TensorFacts | None = node.meta.get(FACTS, {}).get(None)
    if name in _WITHOUT_DERIVATIVE and (own is None or own.requires_grad):
        return False
    return bool(node.meta.get(GRAD_ENABLED)) or (facts is not None and not facts.requires_grad)


def _storage(node: fx.Node) -> int | None:
    facts: TensorFacts | None = node.meta.get(FACTS, {}).get(None)
    return None if facts is None else facts.storage


def _move(node: fx.Node, old: int, new: int) -> None:
    node.meta[FACTS] = {
        place: facts._replace(storage=new) if facts.storage == old else facts
        for place, facts in node.meta[FACTS].items()
    }
