"""Whether a tensor of the arguments must have the rows of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from pyrannc.capture.nodes.dims import AffineReader
from pyrannc.capture.nodes.facts import memory
from pyrannc.capture.nodes.operands import written_memory
from pyrannc.capture.nodes.oracle import real_execution
from pyrannc.capture.nodes.untraceable import UntraceableError, WholeModules
from pyrannc.capture.passes.clean import CleanGraph, clean
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.trace.sample import Sample
from pyrannc.capture.trace.tracer import trace
from pyrannc.errors import CaptureError

_LEAST_EXTENT = 2


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
        watch = _Watch(len(tensors) - place, tensors[place].shape[0] + 1)
        try:
            cleaned = clean(trace(tried, leaves, watch=watch))
        except UntraceableError as error:
            if watch.found or error.needs_rows or is_traced_with(tuple(leaves)):
                raise CaptureError(str(error)) from error
            raise
        if watch.found:
            # The model has caught the error.
            raise _PastTheEndError
        return cleaned

    try:
        with warnings.catch_warnings():
            # Of shapes that the user's call does not have.
            warnings.simplefilter("ignore")
            cleaned = WholeModules((), allow_uncut=True).until_captured(sample.model, attempt)
    except CaptureError:
        return False
    if not any(node.users for node, count in zip(cleaned.inputs, without, strict=True) if count):
        # Then nothing else can be the batch.
        return False
    return bool(cleaned.inputs[place].users)


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
    """A row's number is an index past the end of a tensor; nothing checks that without data."""


class _Watch:
    """Ends a trace in which a row's number is an index past the end of what an argument gives.

    Such an argument has rows. A deep model has few masks, made before its first layer: the rest need not be traced.

    Args:
        from_end: which of the arguments, the last of which is 1.
        rows: with so many it would lack some.

    Attributes:
        found: there was one.
    """

    def __init__(self, from_end: int, rows: int) -> None:
        self.found = False
        self._from_end, self._rows = from_end, rows
        self._derived: set[fx.Node] = set()

    def __call__(self, node: fx.Node, reader: AffineReader) -> None:
        if not self._derived:
            self._derived.add(list(node.graph.find_nodes(op="placeholder"))[-self._from_end])
        if self._derived.isdisjoint(node.all_input_nodes):
            return
        self._derived.add(node)
        if node.target is torch.ops.aten.index.Tensor and node.args[0] in self._derived:
            with real_execution():
                self.found |= _is_past_the_end(node, _Numbers(node.graph, self._rows, reader))
        if self.found:
            raise _PastTheEndError


def _is_past_the_end(node: fx.Node, numbers: _Numbers) -> bool:
    """True for an index that is greater than the last one."""
    tensor, indices = node.args
    given = [index for index in indices if isinstance(index, fx.Node)]  # type: ignore[union-attr]  # a list
    if any(index.meta["val"].dtype != torch.long for index in given):
        # A mask stands for as many indices as it has dimensions.
        return False
    extents = tensor.meta["val"].shape  # type: ignore[union-attr]  # it is a node
    return any(
        isinstance(extent, int) and isinstance(index, fx.Node) and numbers.greatest(index) >= extent
        for extent, index in zip(extents, indices, strict=False)  # type: ignore[arg-type]  # as many as dimensions at most
    )


class _Numbers:
    """What a trace computes of the number of rows alone, for so many rows.

    Args:
        reader: of numbers in the symbol for the rows.
    """

    def __init__(self, graph: fx.Graph, rows: int, reader: AffineReader) -> None:
        self._rows, self._reader = rows, reader
        # A write may go through a view, which no operand tells.
        self._written = {storage for node in graph.nodes for storage in written_memory(node)}

    def greatest(self, index: fx.Node) -> int:
        """The greatest number of an index, -1 where more than the number of rows decides."""
        try:
            found = self._value(index)
        except Exception:  # it depends on data, or on what an operator only finds inside of the trace
            return -1
        return int(found.max()) if isinstance(found, Tensor) and found.numel() and found.dtype == torch.long else -1

    def _value(self, node: fx.Node) -> Any:
        """What a node makes.

        Raises:
            LookupError: it depends on data, or is written to.
        """
        made = node.meta.get("val")
        if isinstance(made, SYMBOLIC):
            dim = self._reader.read(made)
            if dim is None:
                raise LookupError(node.name)
            return dim.at(self._rows)
        if node.op != "call_function" or not self._written.isdisjoint(memory(node)):
            raise LookupError(node.name)
        kwargs = {key: item for key, item in node.kwargs.items() if key != "device"}
        return node.target(*map_arg(node.args, self._value), **map_arg(kwargs, self._value))  # type: ignore[operator]
