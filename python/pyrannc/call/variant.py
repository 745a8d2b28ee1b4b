"""A captured form of a model: in training or evaluation mode, with inputs of one set of shapes."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, TypeAlias

import torch
from torch import fx

from pyrannc._native import Buckets, Graph, Partition, Plan, Program
from pyrannc.blocks.randomness import draw_key
from pyrannc.call.alike import capture_alike, first_difference
from pyrannc.call.data_guards import DataGuards
from pyrannc.call.gradient_hooks import refuse_gradients_in_parts, refuse_hooks_of_copies, refuse_hooks_of_results
from pyrannc.call.guards import ModuleGuards
from pyrannc.call.mixing_parts import DividedCapture, without_mixing
from pyrannc.call.single_row import first_normalising, refuse_single_rows
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import (
    NO_OPTIONS,
    Answering,
    Captured,
    CaptureOptions,
    KeptWhole,
    Sample,
    Tracing,
    capture_sample,
    trace,
)
from pyrannc.capture.nodes.row_conditions import OtherRowsError, first_other
from pyrannc.capture.reads.lacking import Lacking
from pyrannc.capture.trace.attributes import assign
from pyrannc.capture.trace.sequences import ADVICE
from pyrannc.capture.user.row_lists import has_row_lists
from pyrannc.core.graph import GraphFacts, ParamFacts
from pyrannc.core.partition import Parts, StagePart
from pyrannc.core.program import Call, RankProgram
from pyrannc.core.reach import reach
from pyrannc.core.tail import DividedFacts, Join, TailPart
from pyrannc.errors import CaptureError, InputError
from pyrannc.job import agree, process

RowMixing: TypeAlias = Literal["batch", "microbatch"]
"""What an Op that mixes rows works on: the global batch, or whatever part of it is in hand."""
_NO_NUMBER = -1


@dataclass(frozen=True)
class Whole:
    """A captured call before it was divided into body and tail, with its Graph."""

    captured: Captured
    graph: Graph
    facts: GraphFacts

    @property
    def types(self) -> set[torch.dtype]:
        """Of its tensors, also of those inside of what stays whole."""
        inside = (getattr(node.target, "types", ()) for node in self.captured.op_nodes)
        return {value.dtype for value in self.facts.values}.union(*inside)


class Variant:
    """A captured call with its Graph, equal on all ranks, divided into body and tail.

    ``captured``, ``graph`` and ``facts`` are those of the body, which parts of the batch go through.

    Args:
        sample: the call.
        batch: the rows of all ranks.
        row_mixing: what Ops that mix rows work on.
        options: what the script says of captures.
        tracing: gives the trace of the call.

    Attributes:
        has_own_trace: no other call's trace served it.
        whole: body and tail together.
        tail: what runs once a step on all rows, if there is such a thing.
        whole_of: by Value of the body, that of the whole.
        joins: by output of the body, how parts join; ``None`` for rows and for what is the same for any rows.
        loss: the one scalar that can be differentiated, as a Value of the whole.
        most_rows: of batches for which it stands: trials of rows show nothing of what begins at more of them.
        active: the parameters that some rank has a gradient for, by the outputs that it comes from.
        of_tail: first names of parameters that Stages compute with here, but all ranks, and no Stage, in the call of
            the Plan: they have no gradients from here.

    Raises:
        CaptureError: the call cannot be captured.
        MismatchError: another rank captured something else.
    """

    def __init__(
        self,
        sample: Sample,
        batch: BatchRows,
        row_mixing: RowMixing = "batch",
        options: CaptureOptions = NO_OPTIONS,
        tracing: Tracing = trace,
    ) -> None:
        self._options = options
        self._row_mixing = row_mixing
        self._rows = batch.total
        self.has_own_trace = tracing is trace
        found = _divided_capture(sample, batch, row_mixing, options, tracing)
        captured, graph, native, divided = found.captured, found.graph, found.native, found.divided
        self.whole = Whole(captured, graph, GraphFacts.from_json(captured.graph_json, graph.row_dims()))
        self.tail: TailPart | None = divided.tail if divided.tail.ops else None
        self.graph: Graph = native.body
        body_json = captured.graph_json if self.tail is None else native.body.to_json()
        self.captured: Captured = captured.part(body_json, divided.ops, divided.values)
        self.facts = GraphFacts.from_json(body_json, self.graph.row_dims())
        self.whole_of = divided.values
        self.body_of = {whole: body for body, whole in enumerate(divided.values)}
        self.joins: dict[int, Join | None] = dict(zip(self.facts.outputs, divided.joins, strict=True))
        self.loss = self._find_loss()
        covered = captured.covered_rows
        self.most_rows = min(rows for (rows,) in agree.gather_numbers((sys.maxsize if covered is None else covered,)))
        self.told_outside = False
        self.active: dict[frozenset[int], frozenset[str]] = {}
        self.of_tail: list[str] = []
        self._reached: dict[frozenset[int], frozenset[int]] = {}
        self._reached_in_body: dict[frozenset[int], frozenset[int]] = {}
        self.number = _NO_NUMBER
        self.calls = 0
        # What another call of the model finds is what guards, and captures of other calls, are to find.
        assign(captured.carried)
        for unsets in captured.python_state.unset:
            unsets.put()
        self.guards = agree.together(lambda: ModuleGuards(sample.model, captured.python_state))
        changes_buffers = any(op.mutates for op in self.whole.facts.ops)
        self.questions = DataGuards(captured.assumptions, sample.device, waits=changes_buffers)
        self._programs: dict[Hashable, RankProgram] = {}
        self._buckets: Buckets | None = None
        self._check_outputs()
        if self.tail is not None:
            refuse_hooks_of_results(captured, self.whole.facts, self.tail)

    @property
    def _tail_nodes(self) -> list[fx.Node]:
        return [] if self.tail is None else [self.whole.captured.op_nodes[op] for op in self.tail.ops]

    @property
    def can_compare(self) -> bool:
        """True when another capture must give the same: no answer came from parameters, which may be elsewhere now."""
        return process.get_world_size() == 1 or not self.questions.unchecked

    @property
    def asks_rows(self) -> bool:
        """True when other captured forms may stand for other numbers of rows."""
        return bool(self.whole.captured.row_conditions)

    def stands_for(self, rows: int) -> bool:
        """True for a batch of so many rows that the model treats as it treated the captured one."""
        captured = self.whole.captured
        if captured.alone:
            return rows == 1
        return rows <= self.most_rows and first_other(captured.row_conditions, rows) is None

    def compare_with(self, sample: Sample) -> None:
        """Captures the call once more, on this rank alone.

        Raises:
            CaptureError: the model now computes something else, and no guard has seen why.
        """
        if self.chooses_params and any(isinstance(param, Lacking) for param in sample.model.parameters()):
            # What stays whole is tried on what comes to it, which takes the contents of all parameters before it.
            return
        if has_row_lists((sample.args, sample.kwargs)):
            # Other items may show something else of how rows are treated.
            return
        if not self.stands_for(sample.rows):
            # The rows of one rank may be too few, or too many, for what the whole batch does.
            return
        try:
            graph, same = self.captured_again(sample)
        except OtherRowsError:
            # So may the number that these are traced with.
            return
        if not same:
            here, now = first_difference(self.whole.graph.op_texts(), graph.op_texts(), "the same Ops on other tensors")
            raise CaptureError(
                f"the model computes something else than when it was captured: it had\n  {here}\nand now has\n  {now}\n"
                "What decides that must be an argument, an attribute of a sub-module, its training flag, or a global "
                "variable that its forward reads; a closure or a file is not seen to change"
            )

    def captured_again(self, sample: Sample, tracing: Tracing = trace) -> tuple[Graph, bool]:
        """The Graph of one more capture of such a call, on this rank alone, and whether it is this one."""
        captured = self.whole.captured
        again = capture_sample(
            sample,
            all_rows=self._rows,
            options=CaptureOptions(captured.leaves, outputs=self._options.outputs),
            # This rank's rows are not those that have answered.
            answers=Answering(before=captured.assumptions),
            apart=captured.apart,
            row_wise=captured.row_wise,
            tried_together=captured.together,
            tracing=tracing,
        )
        graph = Graph.from_json(again.graph_json)
        return graph, graph.hash() == self.whole.graph.hash() and again.limits == captured.limits

    def reached(self, outputs: frozenset[int]) -> frozenset[int]:
        """The Values of the whole that some of these outputs may depend on."""
        if outputs not in self._reached:
            self._reached[outputs] = reach(self.whole.facts, outputs)
        return self._reached[outputs]

    def reached_in_body(self, outputs: frozenset[int]) -> frozenset[int]:
        """Likewise, of the body."""
        if outputs not in self._reached_in_body:
            reached = self.reached(outputs)
            values = (body for body, whole in enumerate(self.whole_of) if whole in reached)
            self._reached_in_body[outputs] = frozenset(values)
        return self._reached_in_body[outputs]

    @cached_property
    def starts(self) -> frozenset[int]:
        """The outputs of the body that get gradients from outside: of the loss, or, without one inside, all."""
        if self.loss is None or not self.loss_inside:
            return frozenset(self.facts.outputs)
        joined = [] if self.tail is None else [item.value for item in self.tail.joined]
        reached = self.reached(frozenset((self.loss,)))
        found = (self.body_of[value] for value in (self.loss, *joined) if value in reached and value in self.body_of)
        return frozenset(found).intersection(self.facts.outputs)

    def _find_loss(self) -> int | None:
        """The scalar loss, if the model returns exactly one scalar that can be differentiated."""
        values = self.whole.facts.values
        scalars = {
            value for value in self.whole.facts.outputs if not values[value].shape and values[value].requires_grad
        }
        return scalars.pop() if len(scalars) == 1 else None

    @property
    def loss_inside(self) -> bool:
        """True when backwards may run before all parts of the batch have joined, and inside of the call.

        Gradients in float16 need the scale of the loss, which comes with the script's backward.
        """
        return self.loss is not None and (self.tail is None or self.tail.linear) and not self._needs_scale

    @cached_property
    def _needs_scale(self) -> bool:
        return any(value.requires_grad and value.dtype == torch.float16 for value in self.whole.facts.values)

    @property
    def trains(self) -> bool:
        """True when some output leads back to parameters or inputs."""
        return any(self.whole.facts.values[value].requires_grad for value in self.whole.facts.outputs)

    @cached_property
    def param_names(self) -> list[str]:
        """First names of the parameters that some Op, of body or tail, uses."""
        facts = self.whole.facts
        used = {value for op in facts.ops for value in op.operands}
        return [param.names[0] for param in facts.params if param.value in used]

    @cached_property
    def draws(self) -> bool:
        """True when some Op draws random numbers."""
        return any(op.random for op in self.whole.facts.ops)

    @cached_property
    def chooses_params(self) -> bool:
        """True when code of the user stays whole, which may use other parameters at each call."""
        titles = [str(getattr(node.target, "title", "")) for node in self.whole.captured.op_nodes]
        return any(title.startswith(("pyrannc.opaque.module", "pyrannc.opaque.function")) for title in titles)

    @cached_property
    def whole_part(self) -> str:
        """The name of something in the body that stays whole, and may do anything; empty if there is nothing."""
        titles = [str(getattr(node.target, "title", "")) for node in self.captured.op_nodes]
        prefix = "pyrannc.opaque."
        return next((title.removeprefix(prefix) for title in titles if title.startswith(prefix)), "")

    @cached_property
    def normalises_rows_in_hand(self) -> bool:
        """True when batch normalisation in training sees the rows of a microbatch on one Replica."""
        return first_normalising(self.captured) is not None

    def draw(self) -> int:
        """What a call is to draw from: a number from torch's generator if it needs one."""
        return draw_key() if self.draws else 0

    def _check_outputs(self) -> None:
        if not self.facts.ops and self.tail is not None:
            raise CaptureError(
                f"nothing of the model can be divided by rows: {self.first_mixing()} mixes rows of the batch, and all "
                'else follows it; RaNNCModule(..., row_mixing="microbatch") lets each microbatch mix its own rows'
            )
        for value, join in self.joins.items():
            facts = self.facts.values[value]
            if join == "mean" and not facts.dtype.is_floating_point and not facts.dtype.is_complex:
                raise CaptureError(
                    f'output "{facts.name}" has type {facts.dtype} and is made of several rows of each microbatch, so '
                    "it cannot be averaged; return it as a floating-point tensor"
                )

    def first_mixing(self) -> str:
        """The first Op that mixes rows, with its place and how it does."""
        assert self.tail is not None, "there is a tail"
        if not self.tail.mixing:
            return str(self.whole.captured.place(self.tail.ops[0]))
        op, how = self.tail.mixing[0]
        return f"{self.whole.captured.place(op)} ({how})"

    def divide(self, partition: Partition) -> None:
        """Says how the Graph is divided over Stages."""
        self.partition = partition
        self.parts = Parts.from_json(partition.to_json())
        refuse_hooks_of_copies(self.captured, self.parts, self._tail_nodes)
        for part in self.parts.outputs:
            facts = self.facts.values[part.value]
            if part.input is None and part.row_dim is None and any(count for count, _ in facts.shape):
                raise CaptureError(
                    f'the rows of output "{facts.name}" cannot be told: its extents are {_extents(facts.shape)} for a '
                    "batch of b; return it with the batch as a dimension of its own"
                )

    def refuse_sequences(self, batch: BatchRows) -> None:
        """Raises InputError where dimension 0 seems to be the steps of sequences, and dimension 1 the rows."""
        place = self.whole.captured.along_rows
        if place is not None and batch.gathered and batch.in_parts:
            raise InputError(
                f"{place} calls an attention layer that {ADVICE}; if the layer is meant to mix the rows of all ranks, "
                "say so by naming the arguments that have them: RaNNCModule(..., batch_arguments=[...])"
            )

    def follow(self, first: Variant) -> None:
        """Divides the Graph like that of another captured call, so that every parameter stays. All ranks call it."""
        in_tail = first.names_in_tail
        self.divide(agree.together(lambda: first.partition.follow(first.graph, self.graph, in_tail)))
        of_tail = set(in_tail) - {param.names[0] for param in first.held_params()}
        trained = [param for param in self.held_params() if self.facts.values[param.value].requires_grad]
        self.of_tail = sorted({name for param in trained for name in param.names} & of_tail)

    def held_params(self) -> Iterator[ParamFacts]:
        """The parameters that Stages compute with."""
        for part in self.parts.stages:
            yield from (self.facts.params[param] for param in part.params)

    @property
    def names_in_tail(self) -> list[str]:
        """First names of the parameters and buffers that every rank computes with."""
        if self.tail is None:
            return []
        facts = self.whole.facts
        names = [facts.params[param].names[0] for param in self.tail.params]
        return names + [facts.buffers[buffer].name for buffer in self.tail.buffers]

    def program(
        self, plan: Plan, buckets: Buckets, rows: tuple[int, ...], gather_inputs: bool, call: Call
    ) -> RankProgram:
        """What this rank does for a batch; made and checked once for each set of row counts and buckets."""
        if self._buckets is not buckets:
            self._programs.clear()
            self._buckets = buckets
        key = (rows, call)
        if key not in self._programs:
            program = Program.build(plan, self.partition, buckets, list(rows), gather_inputs, call)
            view = RankProgram.from_json(program.rank_view(process.get_rank()))
            part = self.parts.stages[view.stage]
            agree.together(lambda: self._refuse(part, view))
            self._programs[key] = view
        return self._programs[key]

    def _refuse(self, part: StagePart, program: RankProgram) -> None:
        refuse_single_rows(self.captured, self.facts, part, program)
        if self._row_mixing == "batch":
            refuse_gradients_in_parts(self.captured, part, program)


def _divided_capture(
    sample: Sample, batch: BatchRows, row_mixing: RowMixing, options: CaptureOptions, tracing: Tracing
) -> DividedCapture:
    """The call with the smallest tail, as all ranks have captured it. All ranks call it."""

    def capture(
        together: Sequence[str] = (), *, apart: bool = False, kept_whole: Sequence[KeptWhole] = ()
    ) -> DividedCapture:
        captured, graph = capture_alike(
            sample, options, batch, apart=apart, tried_together=together, kept_whole=kept_whole, tracing=tracing
        )
        native = graph.divide_tail(row_mixing)
        return DividedCapture(captured, graph, native, DividedFacts.from_json(native.to_json()))

    first = capture()
    again = partial(capture, kept_whole=first.captured.kept_whole)
    found = without_mixing(sample.model, first, again)
    # Some Op has to divide its rows over the Replicas.
    return found if found.divided.ops else again(apart=True)


def _extents(shape: Sequence[tuple[int, int]]) -> str:
    terms = ["*".join(filter(None, [str(k) if k != 1 else "", "b"])) if k else str(c) for k, c in shape]
    return "(" + ", ".join(terms) + ")"
