"""Capture of one call of a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn

from pyrannc.errors import CaptureError, InputError, RaNNCError

from .computation import compute_the_same
from .lower import Lowered, can_be_groups, is_tried, lower
from .nodes.autocast import autocast_state, no_autocast
from .nodes.dims import Dim
from .nodes.operands import mutated_arguments
from .nodes.ops import root_of
from .nodes.progress import is_at
from .nodes.row_conditions import RowCondition, first_other, other_rows
from .nodes.untraceable import KeptWhole, UntraceableError, WholeModules
from .nodes.validity import refuse_unasked
from .options import NO_OPTIONS, CaptureOptions
from .passes.clean import CleanGraph, clean, place_of
from .passes.data_dependent import ReturnedExtentsError
from .reads.assumptions import FROM_ARGUMENTS, Answering, Assumption, PartOfBatchError, PythonState
from .reads.counted import trials
from .reads.counting import CALLS, after_calls, is_out_of_range
from .reads.handed_back import Given, Put, hand_back
from .rows.counts import trace_for_batch
from .told import ToldRowWise
from .trace.attributes import Carried, assigned, carries_number, not_kept, refuse_changed_tensors
from .trace.dense import refuse_state_not_dense
from .trace.limits import Limit
from .trace.outputs import only_asked
from .trace.sample import Sample
from .trace.tracer import Trace, Tracing, trace
from .user.flatten import Structure, batch_rows, flatten
from .user.left import Beside, found_beside
from .user.plain import is_plain
from .user.source import Place

_Attempt = tuple[Trace, CleanGraph, Lowered]
_NUMBERS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Captured:
    """A captured call: the Graph for planning, and the torch graph that runs.

    ``gm`` takes parameters, buffers and input tensors, each in id order, and returns a flat tuple: the output
    tensors, then the new tensors of reassigned buffers. Gradient modes are not in ``gm`` but in the Graph's ops.

    Attributes:
        op_numbers: those of the Ops before the call was divided.
        outputs: the parts of the result that the script asks for, ``None`` for all.
        puts: what the call puts into its arguments.
        along_rows: where a layer first takes the rows for the steps of a sequence.
        kept_whole: the sub-modules in which nothing could be captured.
        leaves: all paths of what stays whole.
        together: those of sub-modules whose Ops might treat each row by itself together.
        grouped: of the calls of these that are groups, one after another.
        apart: an input is copied first.
        row_wise: of each group, then of each call that was tried, whether it treats each row by itself.
        shown_rows: as many rows trials had memory for, of groups that they show.
        covered_rows: for batches of how many rows trials stand; None where none has shown anything.
        row_conditions: what else batches have in common for which it stands.
        alone: it is for a batch of one row, which is no number to trace with, and would answer some of these otherwise.
        changed_inputs: which of the input tensors the forward changes in place.
        limits: what the forward sets to parameters in place; the Graph starts from these.
        carried: numbers and the like that the call changes for later ones, which do the same with them.
        is_plain: a trace gives it that keeps nothing whole, and is answered nothing.
        can_be_groups: whether calls of some sub-modules can be tried as groups.
        tested_together: sub-modules that are groups because trials say so.
    """

    graph_json: str
    gm: fx.GraphModule
    op_nodes: list[fx.Node]
    op_numbers: list[int]
    values: list[tuple[fx.Node, int | None]]
    params: list[str]
    buffers: list[str]
    constants: list[Tensor]
    assumptions: list[Assumption]
    python_state: PythonState
    dims: dict[fx.Node, Dim]
    input_structure: Structure
    outputs: tuple[str | int, ...] | None
    output_structure: Structure
    puts: tuple[Put, ...]
    along_rows: Place | None
    kept_whole: tuple[KeptWhole, ...]
    leaves: tuple[str, ...]
    together: tuple[str, ...]
    grouped: tuple[str, ...]
    apart: bool
    row_wise: tuple[bool, ...]
    shown_rows: int
    covered_rows: int | None
    row_conditions: tuple[RowCondition, ...]
    alone: bool
    changed_inputs: frozenset[int]
    limits: tuple[Limit, ...]
    carried: tuple[Carried, ...]
    is_plain: bool
    can_be_groups: Callable[[Sequence[str]], bool] = field(repr=False)
    tested_together: tuple[KeptWhole, ...] = ()

    def input_tensors(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, in the order of the Graph's inputs.

        Raises:
            InputError: the arguments are not structured like those of the captured call.
        """
        tensors, structure = flatten((tuple(args), kwargs))
        if structure != self.input_structure:
            raise InputError("the arguments have another structure than those of the captured call")
        return tensors

    def value(self, value: int) -> Tensor:
        """A Value as the captured call made it: a tensor without data."""
        node, place = self.values[value]
        made = node.meta["val"]
        tensor: Tensor = made if place is None else made[place]
        return tensor

    def place(self, op: int) -> Place:
        """Where the model calls an Op."""
        return place_of(self.op_nodes[op])

    def part(self, graph_json: str, ops: Sequence[int], values: Sequence[int]) -> Captured:
        """Some of the Ops and Values under new numbers, as ``graph_json`` has them."""
        return replace(
            self,
            graph_json=graph_json,
            op_nodes=[self.op_nodes[op] for op in ops],
            op_numbers=[self.op_numbers[op] for op in ops],
            values=[self.values[value] for value in values],
        )

    def with_row_wise(self, row_wise: Sequence[bool]) -> Captured:
        """The same, where fewer of the groups and calls that were tried treat each row by itself."""
        graph = json.loads(self.graph_json)
        told = iter(row_wise)
        dropped = [group for group, _ in enumerate(self.grouped) if not next(told)]
        for op, node in zip(graph["ops"], self.op_nodes, strict=True):
            if op.get("row_group") in dropped:
                op.pop("row_group")
            if is_tried(node) and not op.get("mutates") and not next(told):
                op.pop("row_wise", None)
        text = json.dumps(graph, separators=(",", ":"))
        return replace(self, graph_json=text, row_wise=tuple(row_wise))

    def tensors_of(self, result: Any, given: Given) -> list[Tensor]:
        """Those that are the Graph's outputs, in their order, of what the model itself gives.

        Args:
            given: the arguments of the call that has given it.

        Raises:
            CaptureError: it gives others.
        """
        try:
            tensors, _ = flatten(given.with_puts(only_asked(result, self.outputs), self.puts))
        except LookupError:
            tensors = []
        if len(tensors) != self.output_structure.leaf_count:
            raise CaptureError(
                "the model returns other tensors, or puts others into its arguments, when it runs than when it is "
                "captured: let both do the same"
            )
        return tensors

    def hand_back(self, leaves: Sequence[Tensor], arguments: Any) -> Any:
        """The model's result with ``leaves``, in the order of the Graph's outputs, as its tensors.

        Args:
            arguments: positional and named ones that get what the model puts into them.
        """
        result, values = self.output_structure.rebuild(leaves)
        hand_back(self.puts, values, arguments)
        return result


def signature(
    model: nn.Module, tensors: Sequence[Tensor], structure: Structure, per_row: Sequence[int]
) -> tuple[Hashable, ...]:
    """What two calls must share to share a capture.

    These are the structure of the arguments, the types of their tensors, all extents but the batch, the model's
    training flag, the ambient autocast state, and torch's default type. What else a capture rests on, its
    ``python_state`` tells.

    Args:
        tensors: of the arguments.
        structure: the positional and named arguments without them.
        per_row: as of a :class:`Sample`.
    """
    described = tuple(_describe(tensor, count) for tensor, count in zip(tensors, per_row, strict=True))
    return structure, described, model.training, autocast_state(), torch.get_default_dtype()


def _describe(tensor: Tensor, per_row: int) -> Hashable:
    shape = tuple(tensor.shape)
    return per_row, shape[1:] if per_row else shape, tensor.dtype, tensor.requires_grad


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    rows: int,
    per_row: tuple[int, ...] | None = None,
    **how: Any,
) -> Captured:
    """:func:`capture_sample` of a call, all of whose tensors with ``rows`` as dimension 0 have rows by default."""
    with _failing_as_capture():
        sample = Sample.of(model, args, kwargs, device, rows)
    return capture_sample(sample if per_row is None else replace(sample, per_row=per_row), **how)


def capture_sample(
    sample: Sample,
    *,
    all_rows: int | None = None,
    options: CaptureOptions = NO_OPTIONS,
    answers: Answering = FROM_ARGUMENTS,
    apart: bool = False,
    row_wise: Sequence[bool] | None = None,
    tried_together: Sequence[str] = (),
    kept_whole: Sequence[KeptWhole] = (),
    tracing: Tracing = trace,
) -> Captured:
    """Captures a call of a model as it would run on the sample's device, for any number of rows.

    The model is left as it was.

    Args:
        sample: the call.
        all_rows: of the whole batch, as many of which are tried; by default those of the sample.
        options: what the script says of it.
        answers: how the model's questions about data are answered.
        apart: an input with rows is copied first, so that some op treats each row by itself.
        row_wise: as an earlier capture has found; otherwise it is tried.
        tried_together: paths of sub-modules whose Ops may treat each row by itself together, which is tried.
        kept_whole: what an earlier capture has found to stay whole; otherwise it is found out, by one trace for each.
        tracing: gives the trace of the call.

    Raises:
        CaptureError: the call cannot be captured, and no sub-module helps by staying whole; the message names the
            place in the model and what to do.
        PartOfBatchError: the model asks for what only the whole batch tells.
    """
    model, rows = sample.model, sample.rows
    refuse_state_not_dense(model)
    options = options.of(model)
    whole, told = (
        WholeModules(options.leaf_modules, list(kept_whole), allow_uncut=options.allow_uncut),
        ToldRowWise(options.row_wise_modules),
    )
    outputs = options.outputs if model.training else None
    full_masks: set[Place] = set()
    tried_rows = max(1, rows if all_rows is None else all_rows)

    def attempt(leaves: Sequence[str]) -> _Attempt:
        def once() -> _Attempt:
            own = replace(answers, assumes=whole.assumes, full_masks=frozenset(full_masks))
            own = replace(own, as_untraced=whole.as_untraced)
            is_at(f"a trace of the model{f', in which {len(leaves)} of its parts stay whole' if leaves else ''}")
            traced = trace_for_batch(lambda own: tracing(sample, leaves, own, outputs), own, tried_rows)
            _refuse_other_rows(traced, tried_rows, answers)
            _refuse_changed_params(traced)
            refuse_changed_tensors(model, traced.gm)
            name, mode = _qualified_name(model), model.training
            with no_autocast():
                cleaned = clean(traced, apart=apart)
                refuse_unasked(traced.questions, traced.gm.graph, cleaned.gm.graph)
                known = row_wise, options.row_wise_modules, [*told.by_ops, *tried_together]
                lowered = lower(
                    traced, cleaned, name, mode, max(1, rows), *known,
                    all_rows=tried_rows, part_of_batch=answers.part_of_batch,
                )  # fmt: skip
                return traced, cleaned, lowered

        first = None
        while first is None:
            try:
                first = once()
            except ReturnedExtentsError as error:
                if error.origins <= full_masks:
                    raise CaptureError(str(error)) from None
                # Where this batch's masks choose all, and each later one is asked for the same, extents are known.
                full_masks.update(error.origins)
        return _as_later_calls(first, once)

    with _failing_as_capture():
        # Without rows there is nothing to capture for: this raises.
        batch_rows(sample.flat()[0])
        traced, cleaned, lowered = whole.until_captured(model, lambda leaves: told.until_captured(leaves, attempt))
    leaves = (*whole.paths, *told.whole)
    return Captured(
        graph_json=json.dumps(lowered.graph, separators=(",", ":")),
        gm=cleaned.gm,
        op_nodes=cleaned.ops,
        op_numbers=list(range(len(cleaned.ops))),
        values=lowered.values,
        params=traced.params.names,
        buffers=traced.buffers.names,
        constants=lowered.constants,
        assumptions=[*traced.assumptions, *lowered.assumptions],
        python_state=traced.python_state,
        dims=cleaned.dims,
        input_structure=sample.flat()[1],
        outputs=outputs,
        output_structure=traced.output,
        puts=tuple(traced.puts),
        along_rows=traced.along_rows,
        kept_whole=tuple(whole.found),
        leaves=leaves,
        together=(*told.by_ops, *tried_together),
        grouped=lowered.grouped,
        apart=apart,
        row_wise=tuple(lowered.row_wise),
        shown_rows=lowered.shown_rows,
        covered_rows=lowered.covered_rows,
        row_conditions=traced.row_conditions,
        alone=first_other(traced.row_conditions, tried_rows) is not None,
        changed_inputs=_changed_inputs(traced),
        limits=tuple(traced.limits),
        carried=_numbers_alone(traced),
        is_plain=not (leaves or whole.as_untraced or traced.assumptions) and outputs is None and tracing is trace,
        can_be_groups=partial(can_be_groups, cleaned, traced.reader),
    )


@contextmanager
def _failing_as_capture() -> Iterator[None]:
    """Whatever fails makes it a CaptureError."""
    try:
        yield
    except RaNNCError:
        raise
    except Exception as error:
        raise CaptureError(f"the model cannot be captured: {type(error).__name__}: {error}") from error


def _refuse_other_rows(traced: Trace, rows: int, answers: Answering) -> None:
    """Raises an error where the forward asks about its rows what a batch of so many answers in another way.

    Raises:
        PartOfBatchError: the whole batch has not been asked.
        OtherRowsError: it has been.
    """
    other = first_other(traced.row_conditions, rows)
    if other is None or rows == 1:
        return
    if answers.part_of_batch:
        raise PartOfBatchError(f"{other.where} asks for what only the whole batch tells")
    raise other_rows(other, rows)


def _refuse_changed_params(traced: Trace) -> None:
    """Raises CaptureError when the forward changes a parameter in place."""
    changed = _changed(traced.gm)
    placeholders = (node for node in traced.gm.graph.nodes if node.op == "placeholder")
    for name, node in zip(traced.params.names, placeholders, strict=False):
        if node in changed:
            raise CaptureError(
                f"{place_of(changed[node])} changes parameter '{name}' in place in the forward, which runs for each "
                "part of the batch, on the ranks that hold it: compute with a changed copy (`weight.clamp(-1, 1)`), "
                "change the parameter after optimizer.step(), or keep what changes in a buffer; where a first call "
                "alone does so, call the model once before RaNNCModule(model, ...) is made"
            )


def _changed_inputs(traced: Trace) -> frozenset[int]:
    changed, placeholders = _changed(traced.gm), [node for node in traced.gm.graph.nodes if node.op == "placeholder"]
    inputs = placeholders[len(traced.params.names) + len(traced.buffers.names) :]
    return frozenset(place for place, node in enumerate(inputs) if node in changed)


def _changed(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """What a raw trace changes in place, with the last node that does."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return {root_of(operand): node for node in calls for operand in mutated_arguments(node)}


def _as_later_calls(first: _Attempt, once: Callable[[], _Attempt]) -> _Attempt:
    """The call as later ones are, which find what the first one leaves in Python, and must do the same.

    Raises:
        CaptureError: they do something else.
    """
    found, new_tree = first[0], first[0].new_tree
    if new_tree is None and not found.carried and not found.beside:
        return first
    with nullcontext() if new_tree is None else new_tree.adopted(found.left):
        with assigned(found.carried), found_beside(found.beside), _telling_what_is_not_kept(found):
            second = once()
        same = compute_the_same(first[2].graph, second[2].graph)
        if found.carried:
            _refuse_counting(found, second[0], same=same or new_tree is not None)
        elif found.beside and not same and new_tree is None:
            raise found.beside[0].refusal()
        if new_tree is not None and not (same and new_tree.is_like(second[0].new_tree)):
            raise new_tree.refusal()
        _refuse_late_changes(found.beside, second, once)
        for item in found.beside:
            item.keep(second[0].beside)
        # Of what was there before, the first one tells.
        second[0].python_state = replace(second[0].python_state, unset=found.python_state.unset)
    # What this one has read is what later calls will read: the sub-modules that are there now.
    return first if new_tree is None else second


@contextmanager
def _telling_what_is_not_kept(first: Trace) -> Iterator[None]:
    """What the model raises inside may come of what the first call has set and captured calls do not."""
    try:
        yield
    except UntraceableError as error:
        if error.raised:
            error.args = (f"{error}{not_kept(first.carried, first.python_state.written)}",)
        raise


def _refuse_late_changes(left: Sequence[Beside], second: _Attempt, once: Callable[[], _Attempt]) -> None:
    """Raises CaptureError when a call that comes after many does something else on account of what they have counted.

    Args:
        left: by the first call, beside the model's attributes.
    """

    def tried(late: Sequence[Beside]) -> tuple[bool, Exception | None]:
        try:
            # Nobody has asked for what such a call prints.
            with found_beside(late), redirect_stdout(StringIO()):
                return compute_the_same(second[2].graph, once()[2].graph), None
        except Exception as error:  # whatever the user's code raises
            return False, error

    def does_the_same(late: Sequence[Beside]) -> bool:
        same, error = tried(late)
        if not same and not is_out_of_range(error):
            raise late[0].refusal() from error
        return same

    for calls in CALLS:
        late = after_calls(left, second[0].beside, calls)
        if not late:
            return
        if does_the_same(late):
            break
    for trial in trials():
        late = after_calls(left, second[0].beside, trial.call, trial)
        with trial.lengths_followed():
            same, _ = tried(late)
        if not same:
            # Numbers that are followed may be others to the forward.
            does_the_same(after_calls(left, second[0].beside, trial.call))


def _numbers_alone(traced: Trace) -> tuple[Carried, ...]:
    """What a trace leaves in attributes, where that is nothing but numbers and the like: what may stay there."""
    alone = traced.new_tree is None and not traced.beside
    return tuple(traced.carried) if alone and all(isinstance(value, _NUMBERS) for _, value in traced.carried) else ()


def _refuse_counting(first: Trace, second: Trace, *, same: bool) -> None:
    """Raises CaptureError unless a call that found what the first one left did the same and left it so."""
    left = {(attribute.module, attribute.name): value for attribute, value in first.carried}
    others = [
        (attribute, value)
        for attribute, value in second.carried
        if not is_plain(value) or left.get((attribute.module, attribute.name)) != value
    ]
    if others or not same:
        attribute, _ = (others or first.carried)[0]
        raise carries_number(attribute)


def _qualified_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
