"""Runs the model once on tensors without data and records what it does."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from pyrannc.capture.nodes.autocast import Autocast, cached_casts
from pyrannc.capture.nodes.chance import OtherGenerators, other_generators_restored, torch_draws
from pyrannc.capture.nodes.dims import AffineReader, symbols_in
from pyrannc.capture.nodes.facts import FactRecorder
from pyrannc.capture.nodes.fallback import BatchSizes, OperatorFallbacks
from pyrannc.capture.nodes.leaf import captured_tensor_hooks, opaque_autograd_functions, traced_data
from pyrannc.capture.nodes.oracle import Batch, BatchShapeEnv, Oracle, draws
from pyrannc.capture.nodes.progress import goes_on
from pyrannc.capture.nodes.row_conditions import RowCondition
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.nodes.untraced_backwards import UntracedBackwards
from pyrannc.capture.nodes.validity import Question, Validity
from pyrannc.capture.reads.as_one_process import as_one_process
from pyrannc.capture.reads.assumptions import (
    FROM_ARGUMENTS,
    Answering,
    Assumption,
    HeldBuffer,
    PartOfBatchError,
    PythonState,
)
from pyrannc.capture.reads.handed_back import Put, as_given
from pyrannc.capture.reads.hooks import refuse_hooks, watched_hooks
from pyrannc.capture.reads.lacking import Lacking, without_guard
from pyrannc.capture.reads.new_tree import Left, NewTree, Tree
from pyrannc.capture.torch_internals.fakes import FakeTensor, TraceMode, fake_tensors_untold, runs_without_data
from pyrannc.capture.torch_internals.modules import own_buffers, parse_to, reparametrized
from pyrannc.capture.torch_internals.patching import MODULE_TO, NUMBER_REPRS, TENSOR_META, TENSOR_REPR, PatchPoint
from pyrannc.capture.torch_internals.symbols import SYMBOLIC, expression, fake_of
from pyrannc.capture.torch_internals.tensors import is_dense
from pyrannc.capture.torch_internals.tracing import (
    compiling_state,
    current_tracer,
    non_strict_functions,
    note_new_nodes,
    override_builtin_ops,
    proxy_of,
    told_of_no_trace,
    trace_before_dispatch,
    tracing_context,
)
from pyrannc.capture.user.flatten import Structure, flatten
from pyrannc.capture.user.left import Beside
from pyrannc.capture.user.source import Part, Place, SourceTracker
from pyrannc.capture.whole.around import whole_call
from pyrannc.capture.whole.control_flow import control_flow_as_ops
from pyrannc.capture.whole.flex import flex_attention_as_op
from pyrannc.capture.whole.inner_backward import inner_backwards_noted, transforms_refused
from pyrannc.capture.whole.inner_graph import refuse_lost
from pyrannc.capture.whole.kept_whole import Trials, WholeCall, whole_calls_installed
from pyrannc.capture.whole.scripted import opaque_script_functions, scripted_modules
from pyrannc.capture.whole.unknown_lists import refuse_unknown_lists
from pyrannc.errors import CaptureError, RaNNCError

from .attributes import AttributeLog, Carried
from .grad_mode import GradMode
from .limits import Limit, take_limits
from .outputs import only_asked
from .sample import Sample
from .sequences import ADVICE, runs_along_rows

_ERROR_LINES = 4
OF_ALL_RANKS = (
    "Where it takes some numbers of rows only, such as even ones, let all ranks together bring such a number: pad the "
    "batch, or leave out rows, before the call"
)
_LEN = PatchPoint(builtins, "len")


@dataclass
class NamedTensors:
    """The parameters or buffers of a model, each tensor once."""

    names: list[str]
    tensors: list[Tensor]
    aliases: list[list[str]]

    @staticmethod
    def of(first: dict[str, Tensor], every: dict[str, Tensor]) -> NamedTensors:
        """``first`` has each tensor once, ``every`` under all its names."""
        place = {id(tensor): index for index, tensor in enumerate(first.values())}
        aliases: list[list[str]] = [[] for _ in first]
        for name, tensor in every.items():
            if name not in first:
                aliases[place[id(tensor)]].append(name)
        return NamedTensors(list(first), list(map(without_guard, first.values())), aliases)

    def by_every_name(self, replacements: Sequence[Tensor]) -> dict[str, Tensor]:
        """``replacements``, one for each tensor, under all names."""
        named = dict(zip(self.names, replacements, strict=True))
        for aliases, replacement in zip(self.aliases, replacements, strict=True):
            named.update(dict.fromkeys(aliases, replacement))
        return named


@dataclass
class Trace:
    """A raw trace. Placeholders are parameters, buffers, inputs; outputs are result tensors, then buffer updates.

    Attributes:
        conditions: on all symbols, which the answers rest on.
        row_conditions: on the rows alone, which decide where the forward goes on.
        output: the structure of the result, and of what the call puts into its arguments.
        puts: where it puts that.
        needs_length: where an extent that is a symbol besides the rows had to be a number.
        beside: what it leaves for later calls elsewhere than in attributes of sub-modules.
        left: plain values that the call sets attributes to.
        new_tree: the sub-modules that it leaves, where they are others than before.
        limits: what it sets to parameters, which is not in the trace.
        questions: what Ops of it ask.
        attributes_restored: at its end, Python attributes of the model are as they were before the trace.
    """

    gm: fx.GraphModule
    device: torch.device
    params: NamedTensors
    buffers: NamedTensors
    inputs: list[Tensor]
    output: Structure
    puts: list[Put]
    updated_buffers: list[int]
    reader: AffineReader
    conditions: list[sympy.Basic]
    row_conditions: tuple[RowCondition, ...]
    needs_length: Place | None
    assumptions: list[Assumption]
    python_state: PythonState
    carried: list[Carried]
    beside: list[Beside]
    left: list[Left]
    new_tree: NewTree | None
    along_rows: Place | None
    limits: list[Limit]
    questions: Sequence[Question]
    attributes_restored: Callable[[], AbstractContextManager[None]]


Watch = Callable[[fx.Node, AffineReader], None]
"""Takes a node, and what reads numbers in the symbol for the rows."""

Tracing = Callable[..., Trace]
"""What takes the arguments of :func:`trace`, and gives the trace of the call."""


def trace(
    sample: Sample,
    leaf_modules: Sequence[str] = (),
    answers: Answering = FROM_ARGUMENTS,
    outputs: Sequence[str | int] | None = None,
    free: Sequence[Collection[int]] | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Traces one call of a model. The model is left as it was.

    Args:
        outputs: what of the result to keep; ``None``: all.
        free: for each tensor of the arguments, the dimensions besides the rows whose extents are symbols too.
        watch: is told of each node as it is made; what it raises ends the trace, unless the model catches it.

    Raises:
        CaptureError: the call cannot be captured.
        PartOfBatchError: the model asks for what only the whole batch tells.
    """
    refuse_hooks(sample.model)
    session = Session(sample, leaf_modules, answers, outputs, free, watch)
    try:
        traced = session.run()
        session.oracle.refuse_part_of_batch()
        return traced
    except Exception as error:
        session.oracle.refuse_part_of_batch()
        if answers.part_of_batch and session.shape_env.row_conditions:
            # The whole batch may answer otherwise, and not come there.
            raise PartOfBatchError("it asks for what only the whole batch tells") from error
        if isinstance(error, UntraceableError):
            error.functions = session.tracker.functions
        if isinstance(error, RaNNCError):
            raise
        place = session.tracker.failure or Place("")
        cause = f"{type(error).__name__}: {_first_lines(error)}"
        failure = UntraceableError(
            f"{place} cannot be captured: {session.told(cause)}", place, cause, raised=True, rows=session.rows_of(cause)
        )
        failure.functions = session.tracker.functions
        raise failure from error


class Session:
    """A trace of one call: the model, its tensors without data, and who answers for them."""

    def __init__(
        self,
        sample: Sample,
        leaf_modules: Sequence[str],
        answers: Answering,
        outputs: Sequence[str | int] | None,
        free: Sequence[Collection[int]] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.sample = sample
        self.watch = watch
        model, rows, per_row = sample.model, sample.rows, sample.per_row
        self.answers = answers
        self.outputs = outputs
        self.params = NamedTensors.of(
            dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
        )
        self.buffers = NamedTensors.of(dict(model.named_buffers()), dict(model.named_buffers(remove_duplicate=False)))
        self.lone_slices = _lone_slices(self.params.tensors)
        self.inputs, self.input = sample.flat()
        self.free = [()] * len(self.inputs) if free is None else free
        fixed = [size for tensor in (*self.params.tensors, *self.buffers.tensors) for size in tensor.shape]
        for tensor, count in zip(self.inputs, per_row, strict=True):
            fixed += tensor.shape[1:] if count else tensor.shape
        self.trace_rows = _trace_rows(rows, fixed, {1, *per_row}, multiple_of=answers.multiple_of)
        self.real_inputs = [
            _with_rows(tensor, rows, self.trace_rows, count) if count else tensor
            for tensor, count in zip(_distinct(self.inputs), per_row, strict=True)
        ]
        self.autocast = Autocast.now()
        self.grad_mode = GradMode()
        self.tracker = SourceTracker(model)
        self.attributes = AttributeLog(model, self.tracker)
        self.apart = partial(_apart, self.tracker, self.attributes)
        self.tree = Tree(model)
        sample_device = self.inputs[0].device if self.inputs else torch.device("cpu")
        batch = Batch(self.inputs, per_row, rows)
        own = self.tracker, sample_device, batch, answers.before
        self.oracle = Oracle(
            *own,
            assumes=answers.assumes,
            guesses=not any(isinstance(item, Lacking) for item in (*model.parameters(), *model.buffers())),
            part_of_batch=answers.part_of_batch,
            apart=self.apart,
        )
        self.shape_env = BatchShapeEnv()
        self.shape_env.oracle = self.oracle
        self.shape_env.tracker = self.tracker
        self.backwards = UntracedBackwards(self.tracker, self.shape_env)
        self.validity = Validity(self.tracker, self.oracle)
        self.symbol: sympy.Expr | None = None
        self.mode = TraceMode(shape_env=self.shape_env, allow_non_fake_inputs=True, export=True)
        self.leaf_paths = list(leaf_modules)
        self.leaf_paths += [path for path in scripted_modules(model) if not _inside(path, leaf_modules)]

    def fakes(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Parameters, buffers and inputs without data; from then on it is known what stands for the rows."""
        params = [self._fake(f"p{i}", tensor, 0) for i, tensor in enumerate(self.params.tensors)]
        buffers = [self._fake(f"b{i}", tensor, 0) for i, tensor in enumerate(self.buffers.tensors)]
        given = zip(self.real_inputs, self.sample.per_row, self.free, strict=True)
        inputs = [self._fake(f"x{i}", tensor, count, free) for i, (tensor, count, free) in enumerate(given)]
        counted = zip(inputs, self.sample.per_row, strict=True)
        batch = next((tensor.shape[0] // count for tensor, count in counted if count), None)
        self.symbol = expression(batch) if isinstance(batch, torch.SymInt) else None
        self.sizes = BatchSizes(self.trace_rows, batch if isinstance(batch, torch.SymInt) else None)
        return params, buffers, inputs

    def run(self) -> Trace:
        """Traces the call."""
        fake_params, fake_buffers, fake_inputs = self.fakes()
        self.shape_env.batch_symbol, self.shape_env.batch_rows = self.symbol, self.trace_rows
        self.shape_env.lengths = symbols_in(fake_inputs) - {self.symbol}
        recorder = FactRecorder(self.tracker)
        call = _TracedCall(self, recorder)
        try:
            with self.attributes.restoring(), self._environment(recorder), torch.enable_grad():
                gm = trace_before_dispatch(call, fake_params, fake_buffers, fake_inputs)
        finally:
            # What was computed for real may be as large as a whole forward, and an error keeps the session.
            self.oracle.close()
        traced = Trace(
            gm=gm,
            device=self.sample.device,
            params=self.params,
            buffers=self.buffers,
            inputs=self.inputs,
            output=call.output,
            puts=call.puts,
            updated_buffers=call.updated_buffers,
            reader=AffineReader(self.symbol),
            conditions=list(self.shape_env.conditions),
            row_conditions=tuple(self.shape_env.row_conditions.values()),
            needs_length=self.shape_env.needs_length or self.oracle.needs_length,
            assumptions=list(self.oracle.assumptions),
            python_state=self.attributes.state(self.grad_mode.enabled if self.grad_mode.asked else None),
            carried=self.attributes.carried,
            beside=self.attributes.beside.left,
            left=self.attributes.left,
            new_tree=call.new_tree,
            along_rows=call.along_rows,
            limits=take_limits(gm.graph, self.params.names),
            questions=self.validity.questions,
            attributes_restored=self.attributes.restoring,
        )
        if self.backwards:
            with self.attributes.restoring(), self.mode:
                self.backwards.try_all()
        return traced

    def whole_calls(self) -> list[WholeCall]:
        """What stays whole."""
        trials = Trials(self.oracle, self.mode, self.sizes, self.apart)
        return [whole_call(self.sample.model, Part.of(text), trials) for text in self.leaf_paths]

    def rows_of(self, cause: str) -> int:
        """How many rows were traced, where their number may be why that has failed; 0 elsewhere."""
        asked = bool(self.shape_env.row_conditions) or self._names_rows(cause)
        return self.trace_rows if asked else 0

    def told(self, cause: str) -> str:
        """A cause, and what to do where it is about the number of rows."""
        if not self._names_rows(cause):
            return cause
        return f"{cause}, where {self.symbol} is the number of rows. {self._rows_across() or OF_ALL_RANKS}"

    def _rows_across(self) -> str:
        """What to do about a tensor of the arguments whose rows are not its dimension 0, if there may be one."""
        rows = self.sample.rows
        for place, (tensor, count) in enumerate(zip(self.inputs, self.sample.per_row, strict=True)):
            if not count and rows > 1 and rows in tensor.shape[1:]:
                dim = tensor.shape.index(rows, 1)
                return (
                    f"Tensor {place} of the arguments (shape {tuple(tensor.shape)}) has {rows} in dimension {dim}, as "
                    "many as the batch has rows: give what has a part for each row, such as a state of a recurrent "
                    "layer, with the rows as dimension 0, and turn it inside of the model (state.transpose(0, 1))"
                )
        return ""

    def _names_rows(self, cause: str) -> bool:
        return self.symbol is not None and re.search(rf"\b{self.symbol}\b", cause) is not None

    def _fake(self, name: str, tensor: Tensor, per_row: int, free: Collection[int] = ()) -> Tensor:
        # torch would look at a gradient too, of which ranks may have parts.
        if id(tensor) in self.lone_slices or (tensor.is_leaf and isinstance(tensor.grad, Lacking)):
            own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            fake = fake_of(self.mode, name, nn.Parameter(own, tensor.requires_grad), per_row)
        else:
            fake = fake_of(self.mode, name, tensor, per_row, free)
        if fake.device == self.sample.device:
            return fake
        with self.mode:
            moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=self.sample.device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(moved, tensor.requires_grad)
            return moved.requires_grad_(tensor.requires_grad)

    @contextmanager
    def _environment(self, recorder: FactRecorder) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch_draws())
            stack.enter_context(other_generators_restored())
            stack.enter_context(compiling_state())
            stack.enter_context(fake_tensors_untold())
            stack.enter_context(shown_without_data())
            own = self.oracle, self.mode, self.sizes, self.tracker
            stack.enter_context(OperatorFallbacks(*own, self.answers.full_masks).installed())
            stack.enter_context(self.mode)
            stack.enter_context(non_strict_functions())
            stack.enter_context(tracing_context(self.mode))
            stack.enter_context(override_builtin_ops())
            stack.enter_context(lengths_as_sizes())
            stack.enter_context(texts_noted(self.shape_env.note_text))
            stack.enter_context(opaque_autograd_functions(self.backwards))
            stack.enter_context(inner_backwards_noted())
            stack.enter_context(transforms_refused(self.tracker))
            stack.enter_context(opaque_script_functions(*own))
            stack.enter_context(control_flow_as_ops(self.tracker))
            stack.enter_context(flex_attention_as_op(self.tracker))
            stack.enter_context(captured_tensor_hooks(self.backwards))
            stack.enter_context(self.validity.as_ops())
            stack.enter_context(traced_data())
            stack.enter_context(idle_module_moves())
            stack.enter_context(TENSOR_META.replaced_by(lambda _tensor: None))
            stack.enter_context(recorder.recording())
            if self.answers.as_untraced:
                stack.enter_context(told_of_no_trace(_has_data))
            yield


@contextmanager
def _apart(tracker: SourceTracker, attributes: AttributeLog) -> Iterator[None]:
    """What runs here runs again at each call, and is not what is captured."""
    with tracker.unchecked(), attributes.unwatched():
        yield


def _refuse_other_shape(name: str, before: Tensor, now: Tensor) -> None:
    """Raises CaptureError for what a buffer cannot be given, whatever the batch."""
    shape, shape_before = tuple(now.shape), tuple(before.shape)
    if all(isinstance(size, int) for size in shape) and shape != shape_before:
        raise CaptureError(
            f"the forward puts a tensor of shape {shape} into buffer {name}, whose shape is {shape_before}: "
            "buffers keep their shapes. Where the forward sizes it at its first call, call the model once on such a "
            "batch before RaNNCModule(model, ...) is made"
        )


class _TracedCall:
    """The function that is traced: parameters, buffers and inputs as arguments; result tensors as results."""

    def __init__(self, session: Session, recorder: FactRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self.output = Structure(None)
        self.puts: list[Put] = []
        self.updated_buffers: list[int] = []
        self.new_tree: NewTree | None = None
        self.along_rows: Place | None = None
        self.state: dict[str, Tensor] = {}

    def __call__(self, params: list[Tensor], buffers: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        session, model = self._session, self._session.sample.model
        tracer = current_tracer()
        placeholders = [node for node in tracer.graph.nodes if node.op == "placeholder"]
        tensors = [*session.params.tensors, *session.buffers.tensors, *session.real_inputs]
        real = dict(zip(placeholders, tensors, strict=True))
        held = [HeldBuffer(model, name) for name in session.buffers.names]
        session.oracle.attach(tracer, real, len(inputs), session.symbol, held, session.shape_env.lengths)
        session.tracker.outermost = sys._getframe().f_code
        session.tracker.before_calls += [self._note_sequences, lambda *_: goes_on()]
        self._recorder.annotate_nodes_of(tracer.graph)
        session.grad_mode.note_nodes_of(tracer.graph)
        watch = session.watch
        if watch is not None:
            reader = AffineReader(session.symbol)
            note_new_nodes(tracer.graph, lambda node: watch(node, reader))
        state = self.state = session.params.by_every_name(params) | session.buffers.by_every_name(buffers)
        args, kwargs = session.input.rebuild(inputs)
        # Module calls are followed from here on: outside, the fx tracer replaces Module.__call__ itself.
        with (
            reparametrized(model, state),
            whole_calls_installed(session.whole_calls()),
            session.tracker.following(),
            OtherGenerators(model).untraced(session.tracker),
            watched_hooks(model, session.tracker),
            cached_casts(session.autocast.cache),
            as_given((args, kwargs)) as given,
        ):
            with session.attributes.listening(), session.grad_mode.answering(), as_one_process(session.tracker):
                result = model(*args, **kwargs)
            self.puts = given.puts()
            result = given.with_puts(only_asked(result, session.outputs), self.puts)
            # What is returned may be what was given.
            leaves, self.output = flatten(result)
            updates = self._buffer_updates(buffers)
            self.new_tree = session.tree.after(state, session.attributes.where)
        session.attributes.note_changes(lambda item: self._is_of_data(item, tracer))
        _refuse_symbolic_results(self.output)
        refuse_unknown_lists(self.output)
        proxies = (proxy_of(item, tracer) for item in leaves + updates)
        refuse_lost(tracer.graph, [proxy.node for proxy in proxies if proxy is not None])
        return leaves + updates

    def _is_of_data(self, item: Any, tracer: Any) -> bool:
        """True for a tensor that does, and for a number that more than the number of rows decides."""
        if isinstance(item, Tensor):
            return _depends_on_data(item, tracer)
        return bool(expression(item).free_symbols - {self._session.shape_env.batch_symbol})

    def _note_sequences(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not runs_along_rows(module, args, kwargs):
            return
        here = self._session.tracker.here()
        if isinstance(module, nn.RNNBase):
            raise CaptureError(f"{here}: {type(module).__name__} {ADVICE}")
        self.along_rows = self.along_rows or here

    def _buffer_updates(self, buffers: list[Tensor]) -> list[Tensor]:
        """Tensors that the forward put into buffers in place of the old ones."""
        updates = []
        for index, (name, before) in enumerate(zip(self._session.buffers.names, buffers, strict=True)):
            path, _, attribute = name.rpartition(".")
            now = own_buffers(self._session.sample.model.get_submodule(path)).get(attribute)
            if now is not None and now is not before:
                _refuse_other_shape(name, before, now)
                self.updated_buffers.append(index)
                updates.append(now)
        return updates


def _inside(path: str, outer: Sequence[str]) -> bool:
    return any(not name or path == name or path.startswith(f"{name}.") for name in outer)


def _lone_slices(params: Sequence[Tensor]) -> set[int]:
    """``id`` of parameters that are slices of a larger tensor, as ``vector_to_parameters`` leaves them.

    They share a storage with others, but no element.
    """
    real = [param for param in params if not param.is_meta]
    slices = [param for param in real if param.untyped_storage().nbytes() > param.nbytes and is_dense(param)]
    spans = sorted((param.data_ptr(), param.data_ptr() + param.nbytes, id(param)) for param in real)
    shared = {key for (_, end, first), (start, _, second) in pairwise(spans) if start < end for key in (first, second)}
    return {id(param) for param in slices} - shared


def _depends_on_data(tensor: Tensor, tracer: Any) -> bool:
    """True for a tensor that comes from parameters, buffers, inputs or chance; their sizes do not count."""
    proxy = proxy_of(tensor, tracer)
    stack = [proxy.node] if proxy is not None else []
    seen = set(stack)
    while stack:
        node = stack.pop()
        if node.op == "placeholder" or draws(node):
            return True
        if not isinstance(node.meta.get("val"), torch.SymInt):
            new = [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(new)
            stack += new
    return False


def _has_data(tensor: Tensor) -> bool:
    """False for a tensor of the trace that is made of sizes alone, as a mask of ones is."""
    tracer = current_tracer()
    return tracer is None or _depends_on_data(tensor, tracer)


def _trace_rows(rows: int, fixed: Collection[int], per_row: Collection[int], *, multiple_of: int) -> int:
    """A batch size to trace with: at least 2, and no fixed extent, so that nothing equals it by chance.

    Nor does what tensors have of so many rows.
    """
    step = multiple_of or 1
    trace_rows = -(-max(rows, 2) // step) * step
    while any(trace_rows * count in fixed for count in per_row if count):
        trace_rows += step
    return trace_rows


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of those that stood there before: other calls may pass two tensors where this one passes one twice."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        again = id(tensor) in seen
        seen.add(id(tensor))
        found.append(tensor.detach().clone().requires_grad_(tensor.requires_grad) if again else tensor)
    return found


def _with_rows(tensor: Tensor, rows: int, trace_rows: int, per_row: int) -> Tensor:
    """``tensor`` with its rows repeated in turn (zeros for none)."""
    if rows == trace_rows:
        return tensor
    if rows == 0:
        shape = trace_rows * per_row, *tensor.shape[1:]
        return tensor.detach().new_zeros(shape).requires_grad_(tensor.requires_grad)
    index = torch.arange(trace_rows * per_row, device=tensor.device) % (rows * per_row)
    return tensor.detach().index_select(0, index).requires_grad_(tensor.requires_grad)


def _first_lines(error: Exception) -> str:
    return "\n".join(str(error).strip().splitlines()[:_ERROR_LINES])


def _refuse_symbolic_results(structure: Structure) -> None:
    if isinstance(structure.key, tuple) and structure.key[0] in SYMBOLIC:
        raise CaptureError(
            "the model returns a number computed from the batch size or from data, or puts one into an argument; "
            "return a tensor, or leave the number out"
        )
    for child in structure.children:
        _refuse_symbolic_results(child)


@contextmanager
def shown_without_data() -> Iterator[None]:
    """A tensor is shown without its data where it has none: what reads them would show it again in its error."""
    original = TENSOR_REPR.original

    def shown(self: Tensor, **kwargs: Any) -> str:
        if runs_without_data():
            return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype})"
        text: str = original(self, **kwargs)
        return text

    with TENSOR_REPR.replaced_by(shown):
        yield


@contextmanager
def lengths_as_sizes() -> Iterator[None]:
    """``len(x)`` of a traced tensor is ``x.shape[0]``; Python would make it a plain number."""
    original = _LEN.original

    def length(item: Any, /) -> Any:
        return item.shape[0] if isinstance(item, FakeTensor) and item.dim() else original(item)

    with _LEN.replaced_by(length):
        yield


@contextmanager
def texts_noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Tells of each number of a trace that is made a text, which for a plain number is another one."""
    with ExitStack() as stack:
        for point in NUMBER_REPRS:
            stack.enter_context(point.replaced_by(_noted(point.original, note)))
        yield


def _noted(original: Callable[[Any], str], note: Callable[[Any], None]) -> Callable[[Any], str]:
    def text(number: Any) -> str:
        note(number)
        return original(number)

    return text


@contextmanager
def idle_module_moves() -> Iterator[None]:
    """``module.to(...)`` inside forward does nothing where nothing would change (it would replace parameters)."""
    original = MODULE_TO.original

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype = parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        same_dtype = dtype is None or all(t.dtype == dtype or not t.is_floating_point() for t in tensors)
        same_device = device is None or all(t.device.type == device.type for t in tensors)
        return self if same_dtype and same_device else original(self, *args, **kwargs)

    with MODULE_TO.replaced_by(to):
        yield
