"""Ops that read memory by strides: what they read is laid out as it was when the model was traced.

A Value may lie otherwise where it runs: rows that have been joined, sent or received lie one behind the other. No other
Op sees that. What such an Op could read as views of the tensor's own dimensions, it is made to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.facts import FACTS, OF_PLACE, PLACE, TensorFacts
from pyrannc.capture.nodes.operands import arguments, written_memory
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

_ATEN = torch.ops.aten
_STRIDED = (_ATEN.as_strided.default, _ATEN.as_strided_copy.default)
_Read = Callable[[Any], Dim | None]
_Axis = tuple[Dim, Dim]
"""Extent and stride of a dimension."""


def pin_layouts(graph: fx.Graph, read: _Read) -> None:
    """Rewrites ``graph``.

    Args:
        graph: of a captured call.
        read: tells numbers.

    Raises:
        CaptureError: an Op reads what cannot be laid out so, or what is changed later.
    """
    written_later: set[int] = set()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target in _STRIDED:
            base = arguments(node)["self"]
            own = {facts.storage for item in (base, node) for facts in item.meta.get(FACTS, {}).values()}
            is_changed = bool(own & written_later)
            if is_changed or not _as_windows(graph, node, read):
                _pin(graph, node, is_changed)
        written_later |= written_memory(node)


def _as_windows(graph: fx.Graph, node: fx.Node, read: _Read) -> bool:
    """Makes it views of the dimensions of what it reads, of which one may be in windows that overlap, if it is that."""
    given = arguments(node)
    base = given["self"]
    tensor: Tensor = base.meta["val"]

    def number(item: Any) -> Dim | None:
        return read(item.meta["val"] if isinstance(item, fx.Node) else item)

    axes = [(read(size), read(stride)) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    asked = [(number(size), number(stride)) for size, stride in zip(given["size"], given["stride"], strict=True)]
    own, wanted = _known(axes), _known(asked)
    offset = given["storage_offset"]
    if own is None or wanted is None or (offset is not None and number(offset) != read(tensor.storage_offset())):
        return False
    for merged in (None, *range(len(own) - 1)):
        joined = own if merged is None else _joined(own, merged)
        found = None if joined is None else _windows(joined, wanted)
        if found is None:
            continue
        order, window = found
        with graph.inserting_before(node):
            viewed = base
            if merged is not None:
                viewed = _add(graph, node, _ATEN.flatten.using_ints, viewed, merged, merged + 1)
            if window is not None:
                viewed = _add(graph, node, _ATEN.unfold.default, viewed, *window)
        node.target, node.args, node.kwargs = _ATEN.permute.default, (viewed, order), {}
        return True
    return False


def _known(axes: Sequence[tuple[Dim | None, Dim | None]]) -> list[_Axis] | None:
    found = [(size, stride) for size, stride in axes if size is not None and stride is not None]
    return found if len(found) == len(axes) else None


def _joined(axes: Sequence[_Axis], dim: int) -> list[_Axis] | None:
    """The dimensions where one and the next are one, if they lie so."""
    (outer, far), (inner, near) = axes[dim : dim + 2]
    if inner.per_row or far != _times(near, inner.fixed):
        return None
    return [*axes[:dim], (_times(outer, inner.fixed), near), *axes[dim + 2 :]]


def _windows(own: Sequence[_Axis], wanted: Sequence[_Axis]) -> tuple[list[int], tuple[int, int, int] | None] | None:
    """Where the wanted dimensions stand among the own ones, if they are these.

    Two of them may be windows along one: how many, which stand there, and their extent, which stands last. Then the
    dimension, this extent and the step from one window to the next come with it.
    """
    left, places = dict(enumerate(own)), dict[int, int]()
    for place, axis in enumerate(wanted):
        dim = next((dim for dim, item in left.items() if item == axis), None)
        if dim is not None:
            places[place] = dim
            del left[dim]
    rest = [place for place in range(len(wanted)) if place not in places]
    if not left and not rest:
        return [places[place] for place in range(len(wanted))], None
    if len(left) != 1 or len(rest) != 2:
        return None
    ((dim, (length, near)),) = left.items()
    inside, along = rest if wanted[rest[0]][1] == near else reversed(rest)
    (size, own_step), (count, far) = wanted[inside], wanted[along]
    step = far.fixed // near.fixed if near.fixed else far.per_row // near.per_row if near.per_row else 0
    if (
        own_step != near
        or step < 1
        or far != _times(near, step)
        or any(extent.per_row for extent in (length, size, count))
        or not 0 < size.fixed <= length.fixed
        or (length.fixed - size.fixed) // step + 1 != count.fixed
    ):
        return None
    places |= {along: dim, inside: len(own)}
    return [places[place] for place in range(len(wanted))], (dim, size.fixed, step)


def _times(dim: Dim, factor: int) -> Dim:
    return Dim(dim.per_row * factor, dim.fixed * factor)


def _pin(graph: fx.Graph, node: fx.Node, is_changed: bool) -> None:
    given = arguments(node)
    base = given["self"]
    tensor: Tensor = base.meta["val"]
    order = sorted(range(tensor.dim()), key=lambda dim: -_as_number(tensor.stride(dim)))
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor) or is_changed:
        place = node.meta.get(PLACE, Place(""))
        raise CaptureError(
            f"{place} reads memory by strides (as_strided) from a tensor that has gaps, or that is changed in place "
            "afterwards; make it contiguous before, or name the sub-module in leaf_modules"
        )
    with graph.inserting_before(node):
        laid = base
        if order != sorted(order):
            laid = _add(graph, node, _ATEN.permute.default, laid, order)
        # The dimensions stay in the order of memory: what is joined, sent or received lies so, too.
        laid = _add(graph, node, _ATEN.clone.default, laid, memory_format=torch.contiguous_format)
    offset = given["storage_offset"]
    node.args = (laid, given["size"], given["stride"], None if offset is None else offset - tensor.storage_offset())
    node.kwargs = {}


def _as_number(stride: Any) -> int:
    """A stride, or for one that depends on the rows what it is for the traced ones."""
    return int(stride) if isinstance(stride, int) else int(stride.node.hint)


def _add(graph: fx.Graph, like: fx.Node, target: Any, operand: fx.Node, *args: Any, **kwargs: Any) -> fx.Node:
    """A new Op of ``operand`` at the place of ``like`` in the model's source."""
    node = graph.call_function(target, (operand, *args), kwargs)
    with torch.no_grad():
        node.meta["val"] = target(operand.meta["val"], *args, **kwargs)
    requires_grad = any(facts.requires_grad for facts in operand.meta.get(FACTS, {}).values())
    node.meta[FACTS] = {None: TensorFacts(requires_grad, None)}
    node.meta |= {key: like.meta[key] for key in OF_PLACE if key in like.meta}
    return node
