"""Answers to questions about data that the model asks while it is traced.

A trace on fake tensors has no data. When the model branches on some (``if mask.all():``), the slice
of the graph that made the scalar runs on the real sample inputs, and the answer is kept as an
:class:`Assumption`: the captured graph holds only for data that give the same answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pyrannc.capture.reads.assumptions import Assumes, Assumption, HeldBuffer, PartOfBatchError
from pyrannc.capture.reads.hooks import nothing_collected
from pyrannc.capture.torch_internals.fakes import FakeTensor, known_data, unset_fake_temporarily
from pyrannc.capture.torch_internals.operators import OpOverload, schema
from pyrannc.capture.torch_internals.symbols import SYMBOLIC, ShapeQuestions, asking, expression, hint, is_a_branch
from pyrannc.capture.torch_internals.tensors import DisableTorchFunction, pytree
from pyrannc.capture.torch_internals.tracing import disable_proxy_modes_tracing, not_compiling
from pyrannc.capture.user.source import Place, SourceTracker, distribution_asks
from pyrannc.errors import CaptureError

from .autocast import no_autocast
from .bounds import within_bounds
from .chance import torch_draws, trial_draws
from .dims import symbols_in
from .draws import call_draws
from .facts import memory
from .operands import written_memory
from .questions import question
from .row_conditions import ROWS, RowCondition, is_of_many
from .untraceable import BY_DISTRIBUTIONS, UntraceableError

_BOOLEAN_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose")
_REDRAWS = 16
_BY_KERNEL = ("aten.conv", "aten._conv")
"""Operators that ask of their rows only which kernel would be the fastest."""


class NoDataError(LookupError):
    """The slice of the graph needs a tensor that has no data."""


@contextmanager
def real_execution() -> Iterator[None]:
    """Real, unrecorded, gradient-free execution inside a trace; random state is left as it was.

    Numbers of rows may count those of all ranks, where this rank has its own: IndexError says so, as on the host.
    """
    with (
        unset_fake_temporarily(),
        not_compiling(),
        disable_proxy_modes_tracing(),
        DisableTorchFunction(),
        torch.no_grad(),
        torch_draws(),
        within_bounds(),
        nothing_collected(),
    ):
        yield


@dataclass(frozen=True)
class Batch:
    """The inputs of a call as they came, before their rows were repeated for the trace.

    Attributes:
        tensors: all of them.
        per_row: for each of them, how many elements of its dimension 0 each row has; 0: none.
        rows: how many.
    """

    tensors: Sequence[Tensor]
    per_row: Sequence[int]
    rows: int


class Oracle:
    """Runs slices of the graph under construction on real data.

    Args:
        tracker: knows where in the model the trace is.
        device: that slices run on.
        batch: what questions are about.
        answered: answers to take where the same is asked again, instead of those of the batch.
        assumes: which answers that others than the batch decide are taken.
        guesses: where there are no data, as on the meta device, the usual answer is taken.
        part_of_batch: there are more rows than those of the batch.
        apart: what runs in it is not what is captured, nor is it noted.

    Attributes:
        assumptions: the answers so far.
        needs_length: where something first ran on tensors whose extents have other symbols than that of the rows.
    """

    def __init__(
        self,
        tracker: SourceTracker,
        device: torch.device,
        batch: Batch,
        answered: Sequence[Assumption] = (),
        *,
        assumes: Assumes = Assumes.ANYTHING,
        guesses: bool = True,
        part_of_batch: bool = False,
        apart: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._apart = apart
        self.assumptions: list[Assumption] = []
        self.needs_length: Place | None = None
        self._lengths: frozenset[sympy.Symbol] = frozenset()
        self._part_of_batch = part_of_batch
        self._asked_rows: Place | None = None
        self._tracker = tracker
        self._device = device
        self._batch = batch
        self._answered = list(answered)
        self._assumes = assumes
        self._guesses = guesses
        self._in_operator = False
        self._graph: fx.Graph | None = None
        self._batch_size: sympy.Symbol | None = None
        self._more: dict[int, _Samples] = {}

    def attach(
        self,
        tracer: fx.Tracer,
        samples: dict[fx.Node, Tensor],
        input_count: int,
        batch_size: sympy.Symbol | None,
        buffers: Sequence[HeldBuffer] = (),
        lengths: frozenset[sympy.Symbol] = frozenset(),
    ) -> None:
        """Starts to serve ``tracer``.

        Args:
            tracer: of the running trace.
            samples: the real tensors of its placeholders, inputs of the call last.
            input_count: how many inputs the call has.
            batch_size: stands for the number of rows.
            buffers: whose placeholders stand before the inputs'.
            lengths: symbols that stand for other numbers than that of the rows.
        """
        first = len(samples) - input_count
        inputs = list(samples)[first:]
        self._buffers = dict(zip(list(samples)[first - len(buffers) : first], buffers, strict=True))
        self._inputs = {node: place for place, node in enumerate(inputs)}
        self._with_rows = {node for node, count in zip(inputs, self._batch.per_row, strict=True) if count}
        self._graph, self._lengths = tracer.graph, lengths
        self._samples = _Samples(tracer.root, samples, self._device, {})
        self._batch_size, self._more = batch_size, {}
        self._asked = self._samples
        if self._batch.rows:
            own = {**samples, **dict(zip(inputs, self._batch.tensors, strict=True))}
            self._asked = _Samples(tracer.root, own, self._device, {batch_size: self._batch.rows})

    @property
    def rows(self) -> int:
        """Of the batch, before they were repeated for the trace."""
        return self._batch.rows

    @property
    def attached(self) -> bool:
        """True once a trace is being served."""
        return self._graph is not None

    @contextmanager
    def in_operator(self) -> Iterator[None]:
        """What an operator asks decides nothing that is captured: it asks again when it runs."""
        before, self._in_operator = self._in_operator, True
        try:
            yield
        finally:
            self._in_operator = before

    def close(self) -> None:
        """Lets go of all tensors, and of the model: torch keeps a trace's sizes, and so who answers for them."""
        self._graph, self._apart = None, nullcontext
        self._samples = self._asked = _Samples(None, {}, self._device, {})
        self._inputs, self._buffers, self._more = {}, {}, {}
        self._with_rows = set()

    def value_of(self, node: fx.Node) -> Any:
        """What ``node`` gives for the samples, which have as many rows as the trace.

        Raises:
            NoDataError: the slice reads a tensor without data.
        """
        return self._value(node, self._samples)

    def longer_values_of(self, proxies: Sequence[fx.Proxy | None], operands: Sequence[Any], more: int) -> list[Any]:
        """Operands for so many rows more, which are the first ones again; as they are where they have no proxy.

        Raises:
            NoDataError: a slice reads a tensor without data.
        """
        pairs = zip(proxies, operands, strict=True)
        return [o if p is None else self._longer_value_of(p.node, more) for p, o in pairs]

    def _longer_value_of(self, node: fx.Node, more: int) -> Any:
        if more not in self._more:
            counts = {node: self._batch.per_row[place] for node, place in self._inputs.items()}
            self._more[more] = self._samples.with_more_rows(more, counts, self._batch_size)
        return self._value(node, self._more[more])

    def _value(self, node: fx.Node, samples: _Samples, seed: int | None = None, *, now: bool = False) -> Any:
        """``seed`` starts the random generator for the run; ``now``: as what was written later has left it."""
        # What stays whole may draw from other generators than torch's.
        with real_execution(), no_autocast(), trial_draws(seed or 0), self._apart(), torch_draws(seed, self._device):
            nodes = self._slice_of(node, samples.known, now=now)
            self._note_lengths([*nodes, node])
            samples.run(nodes)
            return samples.known[node]

    def _note_lengths(self, nodes: Sequence[fx.Node]) -> None:
        """What runs on a sample has its lengths."""
        if self.needs_length is None and any(symbols_in(node.meta.get("val")) & self._lengths for node in nodes):
            self.needs_length = self._tracker.here()

    def constant_of(self, node: fx.Node) -> int | float | bool | None:
        """The number that ``node``, a tensor of one element, has in every call; None if something may change it."""
        assert self._graph is not None
        if any(written_memory(other) & memory(node) for other in self._graph.nodes):
            return None
        if not self.is_constant(node):
            return None
        try:
            value = self.value_of(node)
        except NoDataError:
            return None
        with real_execution():
            number: int | float | bool = value.item()
        return number

    def is_constant(self, node: fx.Node) -> bool:
        """True for what ``node`` gives alike in every call."""
        return all(_is_fixed(ancestor) for ancestor in self._slice_of(node))

    def is_of_inputs(self, node: fx.Node) -> bool:
        """True for what the inputs of the call alone decide."""
        slice_of = self._slice_of(node)
        return not any(draws(item) or (item.op == "placeholder" and item not in self._inputs) for item in slice_of)

    def sample_of(self, node: fx.Node) -> Any:
        """What a tensor is now; where there is no data, random numbers of the same form, to learn shapes from."""
        try:
            return self._value(node, self._samples, now=True)
        except NoDataError:
            fake = node.meta.get("val")
            if not isinstance(fake, Tensor):
                raise
        shape = [hint(size) if isinstance(size, torch.SymInt) else size for size in fake.shape]
        with real_execution():
            if fake.dtype.is_floating_point or fake.dtype.is_complex:
                return torch.randn(shape, dtype=fake.dtype, device=self._device)
            return torch.zeros(shape, dtype=fake.dtype, device=self._device)

    def ask_rows(self, here: Place) -> None:
        """Notes that an answer depends on rows of the batch.

        Raises:
            PartOfBatchError: it may not be that of the whole batch, so that the rest of the trace would be in vain.
        """
        self._asked_rows = self._asked_rows or here
        self.refuse_part_of_batch()

    def refuse_part_of_batch(self) -> None:
        """Raises PartOfBatchError if an answer may not be that of the whole batch: the model may have caught it."""
        if self._part_of_batch and self._asked_rows is not None:
            raise PartOfBatchError(f"{self._asked_rows} asks for what only the whole batch tells")

    def answer(self, expr: sympy.Basic) -> sympy.Basic:
        """The value of a data-dependent expression for the batch; recorded as an assumption."""
        origins = {symbol: self._origin(symbol) for symbol in sorted(expr.free_symbols, key=str)}
        here, assumed = self._tracker.here(), False
        slices = {symbol: (self._slice_of(node), read) for symbol, (node, read) in origins.items()}
        if any(node in self._with_rows for nodes, _ in slices.values() for node in nodes):
            self.ask_rows(here)
        answer = self._answer_before(expr, here)
        if answer is None:
            try:
                values = {symbol: read(self._value(node, self._asked)) for symbol, (node, read) in origins.items()}
                answer = expr.subs(values)
                if not self._in_operator:
                    self._refuse_chance(expr, origins, answer)
            except NoDataError:
                answer = expr.subs({symbol: _usual_answer(node) for symbol, (node, _) in origins.items()})
                assumed = True
        if self._in_operator:
            return answer
        again = question(expr, answer, slices, self._inputs, self._asked.run_node, self._device)
        if again is None and not all(self._is_number(symbol) for symbol in origins):
            # Other data give another number of steps of a loop, say: no answer of this batch would do for them.
            cause = f"it decides by how many elements of a tensor meet a condition ({expr}), as a loop over them does"
            raise UntraceableError(f"{here}: {cause}", here, cause)
        if again is None:
            own = self._inputs, self._asked.run_node, self._device, self._buffers
            again = question(expr, answer, slices, *own)
            needed = Assumes.ANYTHING if again is None else Assumes.OF_BUFFERS
            may_take = self._by_chance(origins) or (assumed and self._guesses)
            if not may_take and self._assumes < needed:
                cause = f"it decides by what it computes ({expr})"
                if distribution_asks():
                    cause += BY_DISTRIBUTIONS
                raise UntraceableError(f"{here}: {cause}", here, cause, may_assume=needed)
            if not may_take and assumed and again is None:
                raise CaptureError(
                    f"{here} decides by what it computes ({expr}), and this rank lacks parameters to find out how; "
                    "call undeploy() before this kind of call, or make it the first one"
                )
        self.assumptions.append(Assumption(str(expr), str(answer), here, assumed, again, answer))
        return answer

    def refuse_granted(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
        """Raises UntraceableError for what an operator takes an extent of data for: nothing would ask later data.

        What the model itself checks of it (``torch._check``) is its word.
        """
        if self._in_operator:
            here, cause = self._tracker.here(), f"it takes an extent that data tell ({symbol}) for {size}"
            raise UntraceableError(f"{here}: {cause}", here, cause)

    def _by_chance(self, origins: dict[sympy.Basic, Any]) -> bool:
        """True for what random numbers alone decide."""
        return all(
            any(draws(ancestor) for ancestor in self._slice_of(node))
            and not any(ancestor.op == "placeholder" for ancestor in self._slice_of(node))
            for node, _ in origins.values()
        )

    def _answer_before(self, expr: sympy.Basic, here: Place) -> sympy.Basic | None:
        """The answer to take, if the same was asked next at the same place."""
        for index, known in enumerate(self._answered):
            if (known.expr, known.where) == (str(expr), here):
                return self._answered.pop(index).answer
        return None

    def _refuse_chance(self, expr: sympy.Basic, origins: dict[sympy.Basic, Any], answer: sympy.Basic) -> None:
        """Raises CaptureError if the answer is another one when random numbers are drawn again."""
        slices = (self._slice_of(node) for node, _ in origins.values())
        if not any(_changes_by_chance(ancestor) for nodes in slices for ancestor in nodes):
            return
        for seed in range(_REDRAWS):
            drawn = self._asked.anew()
            values = {symbol: read(self._value(node, drawn, seed)) for symbol, (node, read) in origins.items()}
            if expr.subs(values) != answer:
                here, cause = self._tracker.here(), "it decides by a random number what to compute"
                raise UntraceableError(
                    f"{here} decides by a random number what to compute (layer drop or the like), which a captured "
                    "graph cannot do; switch it off, or multiply by a random mask instead",
                    here,
                    cause,
                )

    def _origin(self, symbol: sympy.Basic) -> tuple[fx.Node, Any]:
        """The latest node that defines ``symbol``, and how to read the symbol from the node's value."""
        assert self._graph is not None
        for node in reversed(self._graph.nodes):
            read = _reader(node, symbol)
            if read is not None:
                return node, read
        here, cause = self._tracker.here(), f"it asks for {symbol}, a size that no operator of the captured graph makes"
        raise UntraceableError(f"{here}: {cause}", here, cause)

    def _is_number(self, symbol: sympy.Basic) -> bool:
        """True for what is read from a tensor, be it an extent of others too; False for what is an extent alone."""
        assert self._graph is not None
        made = (node.meta.get("val") for node in self._graph.nodes)
        return any(isinstance(value, SYMBOLIC) and symbol in expression(value).free_symbols for value in made)

    def _slice_of(self, node: fx.Node, known: Container[fx.Node] = (), *, now: bool = False) -> list[fx.Node]:
        """``node`` and what it is computed from, in graph order; ``known`` nodes and their ancestors are left out.

        Args:
            now: with what has written to its memory since.
        """
        assert self._graph is not None
        until = None if now else node
        before = list(takewhile(lambda candidate: candidate is not until, self._graph.nodes))
        writes = [candidate for candidate in before if written_memory(candidate) and candidate not in known]
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            while stack:
                current = stack.pop()
                if current not in known and current not in needed:
                    needed.add(current)
                    stack.extend(current.all_input_nodes)
            # Whoever reads memory depends on what was written there, be it through another view.
            read = {place for reader in needed for operand in reader.all_input_nodes for place in memory(operand)}
            read |= memory(node) if now else set()
            stack += [write for write in writes if write not in needed and written_memory(write) & read]
        return [candidate for candidate in (before if now else (*before, node)) if candidate in needed]


class _Samples:
    """Real tensors in the place of a trace's placeholders, and what nodes make of them.

    Args:
        root: has the trace's constants.
        tensors: of the placeholders.
        device: that nodes run on.
        sizes: of symbols, where not as in the trace.

    Attributes:
        known: what has been computed.
    """

    def __init__(self, root: Any, tensors: dict[fx.Node, Tensor], device: torch.device, sizes: dict[Any, int]) -> None:
        self.known: dict[fx.Node, Any] = {}
        self._root = root
        self._tensors = tensors
        self._device = device
        self._sizes = sizes
        self._written: set[fx.Node] = set()
        self._shared: set[fx.Node] = set()

    def anew(self) -> _Samples:
        """The same tensors with nothing computed."""
        return _Samples(self._root, self._tensors, self._device, self._sizes)

    def with_more_rows(self, more: int, per_row: Mapping[fx.Node, int], batch_size: Any) -> _Samples:
        """The same with so many rows more, the first ones again."""
        tensors, sizes = dict(self._tensors), dict(self._sizes)
        for node, count in per_row.items():
            if count:
                tensor = tensors[node].detach()
                extent = tensor.shape[0]
                index = torch.arange(extent + more * count, device=tensor.device) % extent
                with real_execution():
                    tensors[node] = tensor.index_select(0, index)
                sizes[batch_size] = extent // count + more
        return _Samples(self._root, tensors, self._device, sizes)

    def run(self, nodes: Sequence[fx.Node]) -> None:
        """Computes some nodes; what others need of them comes before.

        Raises:
            NoDataError: a tensor without data is needed.
        """
        written = {place for node in nodes for place in written_memory(node)}
        self._written = {node for node in nodes if memory(node) & written}
        for node in nodes:
            self._keep_samples(node)
            value = self.run_node(node)
            if isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta):
                raise NoDataError(str(node.target))
            self.known[node] = value

    def _keep_samples(self, node: fx.Node) -> None:
        """Copies what a node is to change and somebody else has."""
        for operand in node.all_input_nodes:
            if operand in self._shared and written_memory(node) & memory(operand):
                self._shared.discard(operand)
                self.known[operand] = self.known[operand].clone()

    def run_node(self, node: fx.Node) -> Any:
        """What one node gives, once those before it are known."""
        if node.op == "placeholder":
            sample = self._tensors[node]
            if sample.is_meta or isinstance(sample, FakeTensor):
                raise NoDataError(str(node.target))
            sample = sample.detach().to(self._device)
            if node in self._written:
                return sample.clone()
            self._shared.add(node)
            return sample
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
        if isinstance(argument, SYMBOLIC):
            size = expression(argument).subs(self._sizes)
            return int(size) if size.is_Integer else hint(argument)
        return self._device if isinstance(argument, torch.device) else argument


def _reader(node: fx.Node, symbol: sympy.Basic) -> Any:
    """How to read ``symbol`` from the value of ``node``; None if the node does not define it."""
    value = node.meta.get("val")
    if isinstance(value, SYMBOLIC):
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


def _is_fixed(node: fx.Node) -> bool:
    """True for what follows from its operands alone, and for tensors that the forward itself writes down."""
    if node.op == "get_attr":
        return isinstance(node.meta.get("val"), FakeTensor)
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and not draws(node))


def draws(node: fx.Node) -> bool:
    """True for an operator that draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _changes_by_chance(node: fx.Node) -> bool:
    """True for an operator that gives something else when it draws again, as dropout of nothing does not."""
    return isinstance(node.target, OpOverload) and call_draws(node.target, node.args, node.kwargs)


def _usual_answer(node: fx.Node) -> int:
    """True for questions of the form "are all ...?", False for other questions."""
    sources = node.all_input_nodes
    return int(bool(sources) and "all" in str(sources[0].target))


class BatchShapeEnv(ShapeQuestions):
    """Shapes with one batch symbol: questions about data go to the oracle, a fixed batch size is an error."""

    oracle: Oracle | None = None
    tracker: SourceTracker | None = None
    batch_symbol: sympy.Symbol | None = None
    batch_rows: int = 0
    """How many rows it stands for in the sample."""
    lengths: frozenset[sympy.Symbol] = frozenset()
    """What stands for other numbers than that of the rows."""
    needs_length: Place | None = None
    """Where one of these first had to be a number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row_conditions: dict[sympy.Basic, RowCondition] = {}
        self._known_guards = 0
        self._by_kernel: set[sympy.Basic] = set()

    def answer(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The oracle's answer, once it is there."""
        if self.oracle is None or not self.oracle.attached:
            return None
        return self.oracle.answer(expr)

    def note_text(self, number: Any) -> None:
        """Notes that a number is made a text."""
        if expression(number).free_symbols & self.lengths:
            self._note_length()

    def _note_length(self) -> None:
        if self.needs_length is None:
            self.needs_length = Place("") if self.tracker is None else self.tracker.here()

    def granted(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
        """Tells the oracle, once it is there."""
        if self.oracle is not None and self.oracle.attached:
            self.oracle.refuse_granted(symbol, size)

    def answered(self, expr: sympy.Basic, answer: sympy.Basic) -> None:
        """Notes an answer that fixes a length, and one about the rows that decides where the forward goes on.

        Raises:
            UntraceableError: it fixes the batch size.
        """
        if any(map(self.is_fixed, self.lengths)):
            self._note_length()
        # A number such as half of the rows, rounded, leaves several values of them.
        is_number = isinstance(expr, sympy.Expr) and self.batch_symbol in expr.free_symbols
        if self.batch_symbol is None or not (is_number or self.is_fixed(self.batch_symbol)):
            self._note_condition(expr, answer)
            return
        if not self.is_fixed(self.batch_symbol) and is_of_many(expr, self.batch_symbol, self.batch_rows, answer):
            self._note_number(expr, answer)
            return
        place = self._here()
        cause = (
            f"it needs the number of rows as a Python number ({expr}); `int(x.shape[0])` is one, `x.shape[0]` is not"
        )
        message = (
            f"{place} works for one batch size only: it needs the value of {expr}, where "
            f"{self.batch_symbol} is the batch size. Rows are split over devices, so the model must work for any "
            "number of rows: replace the Python number, such as `int(x.shape[0])`, by `x.shape[0]` or -1, and a "
            "Python loop over the rows by a tensor operation."
        )
        # With other rows it may be a number that many have in common, or a question that has another answer.
        rows = 0 if is_number and self.is_fixed(self.batch_symbol) else self.batch_rows
        raise UntraceableError(message, place, cause, needs_rows=True, rows=rows)

    def _note_number(self, expr: sympy.Basic, answer: sympy.Basic) -> None:
        """Notes a number that many batches have in common, such as that of the halves of one."""
        self._known_guards = len(self.guards)
        asked = sympy.Eq(expr.xreplace({self.batch_symbol: ROWS}), answer)
        self.row_conditions[asked] = RowCondition(asked, True, self._here())

    def _here(self) -> Place:
        return self.tracker.here() if self.tracker is not None else Place("")

    def _note_condition(self, expr: sympy.Basic, answer: sympy.Basic) -> None:
        rests_on_rows = len(self.guards) > self._known_guards
        self._known_guards = len(self.guards)
        if not {self.batch_symbol} <= expr.free_symbols <= {self.batch_symbol, *self.lengths}:
            return
        asked = expr.xreplace({self.batch_symbol: ROWS})
        if asked in self.row_conditions:
            return
        operator = asking()
        if operator.startswith(_BY_KERNEL):
            self._by_kernel |= {asked} if rests_on_rows else set()
            return
        # Whether extents are equal, which they may be by chance, operators ask to no end that results would show.
        shapes = (rests_on_rows or asked in self._by_kernel) and not isinstance(expr, (sympy.Eq, sympy.Ne))
        if shapes or (not operator and is_a_branch()):
            self.row_conditions[asked] = RowCondition(asked, bool(answer), self._here())
