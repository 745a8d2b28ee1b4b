"""One trace for calls whose tensors have any extents: besides the rows, lengths are symbols in it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.dims import AffineReader, symbols_in
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.nodes.ops import has_effect
from pyrannc.capture.reads.assumptions import FROM_ARGUMENTS, Answering, Assumes, PythonState
from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.symbols import SYMBOLIC, expression, symbolic_integer
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.torch_internals.tracing import LazyGraphModule
from pyrannc.capture.trace.sample import Sample
from pyrannc.capture.trace.tracer import NamedTensors, Session, Trace, trace
from pyrannc.errors import CaptureError

_SHOWN = 3
_LEAST = 2
"""Torch takes it for granted of what is a symbol."""


class FixedLengthError(CaptureError):
    """A trace does not stand for some lengths, or for no others than its own."""


class LengthTrace:
    """The trace of a call in which some extents besides the rows are symbols, and what it asked of them.

    A trace of the same call with other lengths would have had the same answers, where all conditions hold; so it would
    have been this one, with these lengths in it.

    Args:
        free: for each tensor of the arguments, the dimensions besides the rows that may have other extents.

    Raises:
        FixedLengthError: they may not.
        CaptureError: the call cannot be captured so.
    """

    def __init__(
        self, sample: Sample, free: Sequence[Collection[int]], outputs: Sequence[str | int] | None = None
    ) -> None:
        self._free = free
        answers = Answering(assumes=Assumes.NOTHING)
        traced = trace(sample, (), answers, outputs, free)
        traced.gm.graph.eliminate_dead_code(is_impure_node=has_effect)
        placeholders = traced.gm.graph.find_nodes(op="placeholder")
        self._inputs = [node.meta["val"] for node in placeholders][-len(traced.inputs) :]
        lengths = symbols_in(self._inputs) - {traced.reader.symbol}
        self._conditions = [item for item in traced.conditions if item.free_symbols & lengths]
        why = _why_fixed(traced, lengths | {traced.reader.symbol})
        if why:
            raise FixedLengthError(why)
        self._held = _held(traced)
        # No tensor of this call is kept.
        nothing = NamedTensors([], [], [])
        self._trace = replace(traced, params=nothing, buffers=nothing, inputs=[], attributes_restored=nullcontext)

    def __str__(self) -> str:
        asked = ", ".join(map(self._told, self._conditions[:_SHOWN]))
        more = ", and more" * (len(self._conditions) > _SHOWN)
        return f"lengths with {asked}{more}" if asked else "any lengths"

    def _told(self, condition: sympy.Basic) -> str:
        """A condition in terms of the arguments' shapes."""
        names: dict[Any, sympy.Symbol] = {self._trace.reader.symbol: sympy.Symbol("rows")}
        for place, (tensor, free) in enumerate(zip(self._inputs, self._free, strict=True)):
            for dim in free:
                names.setdefault(expression(tensor.shape[dim]), sympy.Symbol(f"x{place}.shape[{dim}]"))
        return str(condition.xreplace(names))

    @property
    def python_state(self) -> PythonState:
        """What the traced call did with the Python attributes of the model."""
        return self._trace.python_state

    def __call__(
        self,
        sample: Sample,
        leaf_modules: Sequence[str] = (),
        answers: Answering = FROM_ARGUMENTS,
        outputs: Sequence[str | int] | None = None,
    ) -> Trace:
        """The trace with the lengths of a call in it.

        Raises:
            FixedLengthError: it does not stand for these.
        """
        session = Session(sample, leaf_modules, answers, outputs)
        fakes = session.fakes()
        own = self._trace
        if _held(session) != self._held:
            raise FixedLengthError("the model has other parameters or buffers")
        bound = self._bound(session)
        copy = _Copy(session, own.reader.symbol, bound)
        return replace(
            own,
            row_conditions=tuple(item.with_lengths(bound) for item in own.row_conditions),
            gm=copy.of(own.gm, [tensor for tensors in fakes for tensor in tensors]),
            params=session.params,
            buffers=session.buffers,
            inputs=session.inputs,
            reader=AffineReader(session.symbol),
            attributes_restored=session.attributes.restoring,
        )

    def _bound(self, session: Session) -> dict[sympy.Symbol, sympy.Integer]:
        """The number of each symbol, the rows among them."""
        symbol, bound = self._trace.reader.symbol, dict[sympy.Symbol, sympy.Integer]()
        if symbol is not None:
            bound[symbol] = sympy.Integer(session.trace_rows)
        for tensor, traced, free in zip(session.inputs, self._inputs, self._free, strict=True):
            for dim in free:
                size = sympy.Integer(tensor.shape[dim])
                if size < _LEAST or bound.setdefault(expression(traced.shape[dim]), size) != size:
                    raise FixedLengthError(f"extents {tuple(tensor.shape)} of an argument are of another kind")
        for condition in self._conditions:
            if condition.xreplace(bound) != sympy.true:
                raise FixedLengthError(f"the model asks whether {self._told(condition)}, and these lengths say no")
        return bound


def _held(of: Trace | Session) -> list[Hashable]:
    """Names and forms of the model's tensors."""
    pairs = [pair for held in (of.params, of.buffers) for pair in zip(held.names, held.tensors, strict=True)]
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in pairs]


def _why_fixed(traced: Trace, known: Collection[sympy.Symbol | None]) -> str:
    """Why a trace stands for its own lengths only; empty if it stands for others."""
    if traced.needs_length is not None:
        return f"{traced.needs_length} needs them as plain numbers"
    asked = next((item.where for item in traced.assumptions if item.question is not None), None)
    if asked is not None:
        return f"{asked} asks its data for what to compute"
    if traced.carried or traced.new_tree is not None or traced.along_rows is not None:
        return "the model changes what later calls find"
    for node in traced.gm.graph.nodes:
        arguments = pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(node.target, OpaqueCall) or any(isinstance(item, SYMBOLIC) for item in arguments):
            return f"{getattr(node.target, '__name__', node.target)} stays whole"
        if not symbols_in(node.meta.get("val")) <= set(known):
            return f"{node.target} has extents that depend on data"
        made = pytree.tree_leaves(node.meta.get("val"))
        if any(isinstance(item, Tensor) and not isinstance(item, FakeTensor) and symbols_in(item) for item in made):
            return f"{node.target} is inside of torch.vmap"
    return ""


class _Copy:
    """Copies a trace's graph, with numbers in the place of lengths.

    Args:
        session: that the copy belongs to.
        symbol: of the rows, in the graph that is copied.
        bound: the number of each symbol; of the rows, as many as the session traces with.
    """

    def __init__(
        self, session: Session, symbol: sympy.Symbol | None, bound: Mapping[sympy.Symbol, sympy.Integer]
    ) -> None:
        self._session = session
        self._rows = {session.symbol: sympy.Integer(session.trace_rows)}
        self._bound = {**bound, symbol: session.symbol}
        self._made: dict[Hashable, Tensor] = {}
        self._env: dict[fx.Node, Any] = {}

    def of(self, gm: fx.GraphModule, given: Sequence[Tensor]) -> fx.GraphModule:
        """The copy.

        Args:
            given: what its placeholders stand for.
        """
        graph, left = fx.Graph(), iter(given)
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, SYMBOLIC):
                value = self._number(node)
                if not isinstance(value, SYMBOLIC):
                    self._env[node] = value
                    continue
            elif node.op == "placeholder":
                value = next(left)
            else:
                value = pytree.tree_map_only(FakeTensor, self._tensor, value)
            copied = self._env[node] = graph.node_copy(node, self._env.__getitem__)
            copied.meta = {**node.meta, "val": value} if "val" in node.meta else dict(node.meta)
        return LazyGraphModule(gm, graph)

    def _number(self, node: fx.Node) -> Any:
        """What a node that gives a number gives here."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _value(self, node: fx.Node) -> Any:
        made = self._env[node]
        return made.meta["val"] if isinstance(made, fx.Node) else made

    def _tensor(self, traced: Tensor) -> Tensor:
        """A tensor without data like one of the trace."""
        form = tuple(traced.shape), traced.stride(), (traced.storage_offset(),)
        shape, stride, (offset,) = (tuple(map(self._size, sizes)) for sizes in form)
        key = *map(_key, (*shape, *stride, offset)), traced.dtype, traced.device, traced.requires_grad
        if key not in self._made:
            with self._session.mode:
                elements = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                memory = torch.empty(elements, dtype=traced.dtype, device=traced.device)
                self._made[key] = memory.as_strided(shape, stride, offset).requires_grad_(traced.requires_grad)
        return self._made[key]

    def _size(self, size: int | torch.SymInt) -> int | torch.SymInt:
        if not isinstance(size, torch.SymInt):
            return size
        here = expression(size).xreplace(self._bound)
        if here.is_Integer:
            return int(here)
        return symbolic_integer(self._session.mode, here, int(here.xreplace(self._rows)))


def _key(size: int | torch.SymInt) -> Hashable:
    return expression(size) if isinstance(size, torch.SymInt) else size
