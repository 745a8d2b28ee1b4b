"""Whether a tensor of the arguments must have the rows of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pyrannc.errors import CaptureError

from .clean import CleanGraph, clean
from .dims import AffineReader, Dim, symbols_in
from .oracle import real_execution
from .sample import Sample
from .tracer import trace
from .untraceable import UntraceableError, WholeModules

_LEAST_EXTENT = 2
_DimOf = Callable[[fx.Node], Dim | None]
"""What a node is that stands for a number."""


def first_that_may_lack_rows(sample: Sample, places: Iterable[int], *, is_plain: bool = False) -> int | None:
    """The first tensor that the model uses while it runs for any number of rows, though that tensor stays as it is.

    Args:
        sample: a call, in which the tensors have rows.
        places: of the tensors in question.
        is_plain: the call has been captured, and :attr:`Captured.is_plain`.
    """

    @cache
    def is_traced_with(leaves: tuple[str, ...]) -> bool:
        """True when nothing more has to stay whole while all of them have rows."""
        if is_plain and not leaves:
            return True
        try:
            trace(sample, leaves)
        except CaptureError:
            return False
        return True

    return next((place for place in places if _may_lack_rows(sample, place, is_traced_with)), None)


def _may_lack_rows(sample: Sample, place: int, is_traced_with: Callable[[tuple[str, ...]], bool]) -> bool:
    tensors, structure = sample.flat()
    without = tuple(0 if index == place else count for index, count in enumerate(sample.per_row))
    if tensors[place].shape[0] < _LEAST_EXTENT:
        # An extent of 1 would go with any.
        tensors[place] = tensors[place].detach().new_zeros(_LEAST_EXTENT, *tensors[place].shape[1:])
    args, kwargs = structure.rebuild(tensors)
    tried = replace(sample, args=args, kwargs=kwargs, per_row=without)

    def attempt(leaves: Sequence[str]) -> CleanGraph:
        try:
            return clean(trace(tried, leaves, watch=_Watch(len(tensors) - place, tensors[place].shape[0] + 1)))
        except UntraceableError as error:
            if error.needs_rows or is_traced_with(tuple(leaves)):
                raise CaptureError(str(error)) from error
            raise

    try:
        with warnings.catch_warnings():
            # Of shapes that the user's call does not have.
            warnings.simplefilter("ignore")
            cleaned = WholeModules((), allow_uncut=True).until_captured(sample.model, attempt)
    except CaptureError:
        return False
    tensor = cleaned.inputs[place]
    if not any(node.users for node, count in zip(cleaned.inputs, without, strict=True) if count):
        # Then nothing else can be the batch.
        return False
    return bool(tensor.users) and not _is_too_short(tensor, tensors[place].shape[0] + 1, cleaned.dims)


def can_be_traced(sample: Sample) -> bool:
    """True when the model can be captured with these rows."""

    def attempt(leaves: Sequence[str]) -> None:
        trace(sample, leaves)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            WholeModules((), allow_uncut=True).until_captured(sample.model, attempt)
    except CaptureError:
        return False
    return True


class _PastTheEndError(CaptureError):
    """A row's number is an index past the end of a tensor."""


class _Watch:
    """Ends a trace whose outcome is known: a deep model has few masks, made before its first layer.

    Args:
        from_end: which of the arguments, the last of which comes first, must not have the rows of the batch.
        rows: with so many it would lack some.
    """

    def __init__(self, from_end: int, rows: int) -> None:
        self._from_end, self._rows = from_end, rows
        self._derived: set[fx.Node] = set()

    def __call__(self, node: fx.Node) -> None:
        if not self._derived:
            self._derived.add(list(node.graph.find_nodes(op="placeholder"))[-self._from_end])
        if self._derived.isdisjoint(node.all_input_nodes):
            return
        self._derived.add(node)
        with real_execution():
            if _is_past_the_end(node, self._derived, self._rows, _dim_of):
                raise _PastTheEndError(f"{node} takes rows that are not there")


def _dim_of(node: fx.Node) -> Dim | None:
    """What a number of a trace is that knows one symbol, that of the rows."""
    size = node.meta.get("val")
    if not isinstance(size, torch.SymInt):
        return None
    symbols = symbols_in(size)
    return AffineReader(next(iter(symbols), None)).read(size) if len(symbols) < 2 else None


def _is_too_short(tensor: fx.Node, rows: int, dims: Mapping[fx.Node, Dim]) -> bool:
    """True when a row's number is an index past the end of what ``tensor`` gives; nothing checks that without data."""
    derived = {tensor}
    for node in tensor.graph.nodes:
        if derived.isdisjoint(node.all_input_nodes):
            continue
        derived.add(node)
        if _is_past_the_end(node, derived, rows, dims.get):
            return True
    return False


def _is_past_the_end(node: fx.Node, derived: Set[fx.Node], rows: int, dim_of: _DimOf) -> bool:
    """True for an index of a tensor that is derived, past the end of it."""
    if node.target is not torch.ops.aten.index.Tensor or node.args[0] not in derived:
        return False
    tensor, indices = node.args
    extents = tensor.meta["val"].shape  # type: ignore[union-attr]  # it is a node
    return any(
        isinstance(extent, int) and isinstance(index, fx.Node) and _greatest(index, rows, dim_of) >= extent
        for extent, index in zip(extents, indices, strict=False)  # type: ignore[arg-type]  # as many as dimensions at most
    )


def _greatest(index: fx.Node, rows: int, dim_of: _DimOf) -> int:
    """The greatest index, if it depends on the number of rows alone."""
    try:
        found = _value(index, rows, dim_of)
    except LookupError:
        return -1
    return int(found.max()) if isinstance(found, Tensor) and found.numel() and found.dtype == torch.long else -1


def _value(node: fx.Node, rows: int, dim_of: _DimOf) -> Any:
    """What a node makes for ``rows`` rows.

    Raises:
        LookupError: it depends on data.
    """
    dim = dim_of(node)
    if dim is not None:
        return dim.at(rows)
    if node.op != "call_function":
        raise LookupError(node.name)

    def real(item: fx.Node) -> Any:
        return _value(item, rows, dim_of)

    kwargs = {key: item for key, item in node.kwargs.items() if key != "device"}
    return node.target(*map_arg(node.args, real), **map_arg(kwargs, real))  # type: ignore[operator]
