"""Several nodes of a flat graph as one function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from pyrannc.capture.torch_internals.levels import ending_regions
from pyrannc.capture.torch_internals.operators import SET_GRAD_ENABLED

from .facts import GRAD_ENABLED, memory
from .leaf import OpaqueCall
from .operands import written_memory
from .ops import draws_random_numbers, opens_region, target_name

_is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled
"""While a call is traced, torch has another function under this name, which answers the model."""


def as_one_call(
    group: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node], device: torch.device, kind: str
) -> OpaqueCall:
    """What :func:`as_one_function` makes of the group, as a call; ``kind``: for the name."""
    function, digest = as_one_function(group, taken, given, device)
    opens = any(opens_region(node) or not _records(node) for node in group)
    forward = ending_regions(function.forward) if opens else function.forward
    call = OpaqueCall(f"{kind}_{digest}", forward, f"{kind}.{digest}")
    # The operands whose memory the group changes.
    written = {storage for node in group for storage in written_memory(node)}
    call.changes = tuple(place for place, node in enumerate(taken) if written & memory(node))
    call.draws = any(draws_random_numbers(node) for node in group)
    call.draws_elsewhere = any(getattr(node.target, "draws_elsewhere", False) for node in group)
    return call


def as_one_function(
    group: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node], device: torch.device
) -> tuple[fx.GraphModule, str]:
    """The group as a function of what it takes, with a digest of its contents, which is the same on all ranks.

    Args:
        group: nodes in order.
        taken: what they read of others.
        given: those whose results are the function's.
        device: every device that the model named is replaced by it.
    """
    inner = fx.Graph()
    copies = {node: inner.placeholder(f"a{place}") for place, node in enumerate(taken)}
    ambient: fx.Node | None = None
    enabled = True
    contents: list[Any] = []
    written = {storage for node in group for storage in written_memory(node)}
    for node in group:
        if _records(node) != enabled:
            enabled = not enabled
            ambient = ambient or inner.call_function(_is_grad_enabled)
            inner.call_function(SET_GRAD_ENABLED, (ambient if enabled else False,))
        args, kwargs = map_aggregate((node.args, node.kwargs), lambda item: _copied(item, copies, device))
        copies[node] = inner.call_function(_function(node, written), args, kwargs, name=node.name)
        contents.append((target_name(node.target), enabled, _described((node.args, node.kwargs), copies)))
    if not enabled:
        inner.call_function(SET_GRAD_ENABLED, (ambient,))
    inner.output(tuple(copies[node] for node in given))
    contents.append([group.index(node) for node in given])
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:12]
    return fx.GraphModule(nn.Module(), inner), digest


def _records(node: fx.Node) -> bool:
    """True where gradients are recorded, if they are around the function."""
    return bool(node.meta.get(GRAD_ENABLED, True))


def _function(node: fx.Node, written: set[int]) -> Any:
    """What computes a node; ``written``: the memory that changes in place."""
    # Kernels may lay out memory in other ways than without data, so that a view is not possible.
    may_copy = node.target is torch.ops.aten.view.default and not written & memory(node)
    return torch.ops.aten.reshape.default if may_copy else node.target


def _copied(item: Any, copies: dict[fx.Node, fx.Node], device: torch.device) -> Any:
    if isinstance(item, torch.device):
        return device
    return copies[item] if isinstance(item, fx.Node) else item


def _described(item: Any, copies: dict[fx.Node, fx.Node]) -> str:
    """Arguments as text, without what is not the same in another process: names of nodes and the device's number."""
    numbers = {copy: place for place, copy in enumerate(copies.values())}

    def described(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return f"%{numbers[copies[item]]}"
        return item.type if isinstance(item, torch.device) else item

    return repr(map_aggregate(item, described))
