"""Answers to questions about data that the model asks while it is traced.

A trace on fake tensors has no data. When the model branches on some (``if mask.all():``), the slice
of the graph that made the scalar runs on the real sample inputs, and the answer is kept as an
:class:`Assumption`: the captured graph holds only for data that give the same answer.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pyrannc.errors import CaptureError

from .assumptions import Assumption
from .questions import question
from .source import Place, SourceTracker
from .torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    ShapeQuestions,
    disable_proxy_modes_tracing,
    expression,
    hint,
    known_data,
    not_compiling,
    pytree,
    schema,
    unset_fake_temporarily,
)

_BOOLEAN_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose")
_CLONED_NUMEL = 1 << 20
_REDRAWS = 16


class NoDataError(LookupError):
    """The slice of the graph needs a tensor that has no data."""


@contextmanager
def real_execution() -> Iterator[None]:
    """Real, unrecorded, gradient-free execution inside a trace; random state is left as it was."""
    with (
        unset_fake_temporarily(),
        not_compiling(),
        disable_proxy_modes_tracing(),
        DisableTorchFunction(),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
    ):
        yield


class Oracle:
    """Runs slices of the graph under construction on real data."""

    def __init__(self, tracker: SourceTracker, device: torch.device) -> None:
        self.assumptions: list[Assumption] = []
        self.known: dict[fx.Node, Any] = {}
        self._tracker = tracker
        self._device = device
        self._graph: fx.Graph | None = None
        self._root: Any = None

    def attach(self, tracer: fx.Tracer, samples: dict[fx.Node, Tensor], input_count: int) -> None:
        """Starts to serve ``tracer``; ``samples`` are the real tensors of its placeholders, inputs of the call last."""
        first_input = len(samples) - input_count
        self._inputs = {node: place - first_input for place, node in enumerate(samples) if place >= first_input}
        self._graph = tracer.graph
        self._root = tracer.root
        self._samples = samples

    @property
    def attached(self) -> bool:
        """True once a trace is being served."""
        return self._graph is not None

    def close(self) -> None:
        """Lets go of all tensors."""
        self.known.clear()
        self._graph = self._root = None
        self._samples = {}
        self._inputs = {}

    def value_of(self, node: fx.Node, seed: int | None = None) -> Any:
        """What ``node`` gives for the sample inputs; ``seed`` starts the random generator for the run.

        Raises:
            NoDataError: the slice reads a tensor without data.
        """
        with real_execution():
            if seed is not None:
                torch.manual_seed(seed)
            return self._run_slice(node)

    def sample_of(self, node: fx.Node) -> Any:
        """Like :meth:`value_of`; where there is no data, random numbers of the same form, to learn shapes from."""
        try:
            return self.value_of(node)
        except NoDataError:
            fake = node.meta.get("val")
            if not isinstance(fake, Tensor):
                raise
        shape = [hint(size) if isinstance(size, torch.SymInt) else size for size in fake.shape]
        with real_execution():
            if fake.dtype.is_floating_point or fake.dtype.is_complex:
                return torch.randn(shape, dtype=fake.dtype, device=self._device)
            return torch.zeros(shape, dtype=fake.dtype, device=self._device)

    def answer(self, expr: sympy.Basic) -> sympy.Basic:
        """The value of a data-dependent expression for the sample inputs; recorded as an assumption."""
        origins = {symbol: self._origin(symbol) for symbol in sorted(expr.free_symbols, key=str)}
        assumed = False
        try:
            answer = expr.subs({symbol: read(self.value_of(node)) for symbol, (node, read) in origins.items()})
            self._refuse_chance(expr, origins, answer)
        except NoDataError:
            answer = expr.subs({symbol: _usual_answer(node) for symbol, (node, _) in origins.items()})
            assumed = True
        slices = {symbol: (self._slice_of(node), read) for symbol, (node, read) in origins.items()}
        again = question(expr, answer, slices, self._inputs, self._run_node, self._device)
        self.assumptions.append(Assumption(str(expr), str(answer), self._tracker.here(), assumed, again))
        return answer

    def _refuse_chance(self, expr: sympy.Basic, origins: dict[sympy.Basic, Any], answer: sympy.Basic) -> None:
        """Raises CaptureError if the answer is another one when random numbers are drawn again."""
        if not any(draws(ancestor) for node, _ in origins.values() for ancestor in self._slice_of(node)):
            return
        kept = self.known
        try:
            for seed in range(_REDRAWS):
                self.known = {}
                values = {symbol: read(self.value_of(node, seed)) for symbol, (node, read) in origins.items()}
                if expr.subs(values) != answer:
                    raise CaptureError(
                        f"{self._tracker.here()} decides by a random number what to compute (layer drop or the like), "
                        "which a captured graph cannot do; switch it off, or multiply by a random mask instead"
                    )
        finally:
            self.known = kept

    def _origin(self, symbol: sympy.Basic) -> tuple[fx.Node, Any]:
        """The latest node that defines ``symbol``, and how to read the symbol from the node's value."""
        assert self._graph is not None
        for node in reversed(self._graph.nodes):
            read = _reader(node, symbol)
            if read is not None:
                return node, read
        raise CaptureError(f"{self._tracker.here()} asks for {symbol}, whose origin is not in the captured graph")

    def _run_slice(self, node: fx.Node) -> Any:
        for current in self._slice_of(node, self.known):
            value = self._run_node(current)
            if isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta):
                raise NoDataError(str(current.target))
            self.known[current] = value
        return self.known[node]

    def _slice_of(self, node: fx.Node, known: Container[fx.Node] = ()) -> list[fx.Node]:
        """``node`` and what it is computed from, in graph order; ``known`` nodes and their ancestors are left out."""
        assert self._graph is not None
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            current = stack.pop()
            if current not in known and current not in needed:
                needed.add(current)
                stack.extend(current.all_input_nodes)
        return [candidate for candidate in self._graph.nodes if candidate in needed]

    def _run_node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            sample = self._samples[node]
            if sample.is_meta or isinstance(sample, FakeTensor):
                raise NoDataError(str(node.target))
            sample = sample.detach().to(self._device)
            # The slice may write in place; only small tensors are worth the copy.
            return sample.clone() if sample.numel() < _CLONED_NUMEL else sample
        if node.op == "get_attr":
            value: Any = self._root
            for name in str(node.target).split("."):
                value = getattr(value, name)
            if isinstance(value, FakeTensor):
                value = known_data(value)
                if value is None:
                    raise NoDataError(str(node.target))
            return value.to(self._device) if isinstance(value, Tensor) else value
        assert callable(node.target)
        args, kwargs = pytree.tree_map(self._real_argument, (node.args, node.kwargs))
        return node.target(*args, **kwargs)

    def _real_argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self.known[argument]
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return hint(argument)
        return self._device if isinstance(argument, torch.device) else argument


def _reader(node: fx.Node, symbol: sympy.Basic) -> Any:
    """How to read ``symbol`` from the value of ``node``; None if the node does not define it."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if expression(value) == symbol:
            return lambda real: real
        target = node.target
        reads_boolean = isinstance(target, OpOverload) and schema(target).name in _BOOLEAN_READS
        if reads_boolean and symbol in expression(value).free_symbols:
            return lambda real: int(bool(real))
        return None
    tensors = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
    for index, tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt) and expression(size) == symbol:
                return lambda real, index=index, dim=dim: (real if index is None else real[index]).shape[dim]
    return None


def draws(node: fx.Node) -> bool:
    """True for an operator that draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _usual_answer(node: fx.Node) -> int:
    """True for questions of the form "are all ...?", False for other questions."""
    sources = node.all_input_nodes
    return int(bool(sources) and "all" in str(sources[0].target))


class BatchShapeEnv(ShapeQuestions):
    """Shapes with one batch symbol: questions about data go to the oracle, a fixed batch size is an error."""

    oracle: Oracle | None = None
    tracker: SourceTracker | None = None
    batch_symbol: sympy.Symbol | None = None

    def answer(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The oracle's answer, once it is there."""
        if self.oracle is None or not self.oracle.attached:
            return None
        return self.oracle.answer(expr)

    def answered(self, expr: sympy.Basic) -> None:
        """Raises CaptureError when the answer fixes the batch size."""
        if self.batch_symbol is None or not self.is_fixed(self.batch_symbol):
            return
        place = self.tracker.here() if self.tracker is not None else Place("")
        raise CaptureError(
            f"{place} works for one batch size only: it needs the value of {expr}, where "
            f"{self.batch_symbol} is the batch size. Rows are split over devices, so the model must work for any "
            "number of rows: replace the Python number by `x.shape[0]` or -1, and a Python loop over the rows by "
            "a tensor operation."
        )
