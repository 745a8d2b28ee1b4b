"""The Actions of one call on one rank, from its own inputs to its own outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from pyrannc.core.program import RankProgram
from pyrannc.runtime import rehearsal
from pyrannc.runtime.batch import Batch, OfBatch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.join import Reductions
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.rows import Pieces
from pyrannc.runtime.seat import Seat
from pyrannc.runtime.timing import Marks
from pyrannc.store.gradient_set import GradientSet

OfOutputs: TypeAlias = Mapping[int | tuple[int, int], Tensor]
"""Gradients of outputs: of this rank's own rows by Value; of what no rank sends another by microbatch and Value, as the
Stage takes them."""


@dataclass(frozen=True)
class Task:
    """What runs.

    Attributes:
        context: the rank's Stage.
        program: its Actions.
        weights: of the outputs.
        reduce: gradients are summed over ranks, where backwards run inside of the call.
    """

    context: StageContext
    program: RankProgram
    weights: Weights
    reduce: bool


class AnyRun(Protocol):
    """A run of a task's Actions.

    Attributes:
        current: the gradients, once backwards have begun.
    """

    current: GradientSet | None

    def take_outputs(self) -> OfBatch:
        """The model's outputs that some Stage makes: this rank's rows, or where there are none, the global batch's. The
        run lets go of them: what becomes of them may keep it."""

    @property
    def kept(self) -> Set[int]:
        """The storages of outputs that a backward to come needs."""

    @property
    def input_grads(self) -> OfBatch:
        """Gradients of the rank's own inputs."""

    def backward(self, grads: OfOutputs, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside; :meth:`begin_backward` comes before.

        Args:
            grads: weighted.
            reached: the Values through which gradients flow.
            keep_graph: it may be called again.
            reduce: sum gradients over ranks.
        """

    def begin_backward(self, find: Callable[[], GradientSet | None]) -> GradientSet:
        """Room for the gradients of backwards to come.

        Args:
            find: a place for them, where the run has none; where that finds none, they go where nobody holds any.
        """

    def release(self) -> None:
        """Drops all tensors."""


class Run:
    """A run whose Actions are carried out one after another.

    Args:
        task: what runs.
        marks: where to note when computations run.
        lends: working copies stay as they are until a backward that comes after the call, even if parameters change.

    Attributes:
        outputs: as :meth:`take_outputs` gives them, in pieces.
    """

    def __init__(self, task: Task, marks: Marks | None, *, lends: bool = True) -> None:
        self._task = task
        self._marks = marks
        self._lends = lends
        self.current: GradientSet | None = None
        self.outputs: Mapping[int, Pieces] = {}
        self.input_grads: OfBatch = {}

    def forward(self, inputs: OfBatch, inside: Mapping[int, Tensor], current: GradientSet | None = None) -> None:
        """Runs the Actions of the call.

        Args:
            inputs: the rank's own.
            inside: the tail's gradients with which backwards inside the call start, by Value.
            current: where to put gradients; by default where nobody holds any.
        """
        task, context, program = self._task, self._task.context, self._task.program
        context.gradients.working.refresh(context.copied.values())
        rehearsal.rehearse_once(context, program, inputs, task.weights)
        self._batch = Batch(context, program, inputs)
        self._seat = Seat(context, program, self._batch, self._marks, lends=self._lends)
        self._executor = Executor(context, self._seat, self._batch, self._marks)
        if program.call == "whole":
            self.current = context.gradients.begin(context.copies, current)
        sent: list[Reductions] = []
        self._executor.run(
            program.forward,
            self.current,
            lambda microbatch, value: task.weights.inside(microbatch, inside.get(value), value),
            reduce=task.reduce,
            when_forward=lambda: sent.append(self._send_totals()),
        )
        context.record.enter_outputs(program)
        totals = {value: Pieces([total]) for value, total in sent.pop().finish().items()}
        self.outputs = {**totals, **self._batch.outputs(self._seat.outputs)}
        if program.call == "whole":
            self.input_grads = self._batch.input_grads(self._seat.input_grads)

    def _send_totals(self) -> Reductions:
        """Starts to sum outputs without rows over the ranks, of which none waits before it needs them."""
        totals = self._task.weights.totals(self._seat.outputs)
        totals.send(self._task.context.totals)
        return totals

    def take_outputs(self) -> OfBatch:
        """The outputs, which the run lets go of."""
        taken, self.outputs = self.outputs, {}
        return {value: pieces.joined() for value, pieces in taken.items()}

    @property
    def kept(self) -> Set[int]:
        """Storages of what the Stage has made."""
        return {output.untyped_storage().data_ptr() for output in self._seat.outputs.values()}

    def begin_backward(self, find: Callable[[], GradientSet | None]) -> GradientSet:
        """Room for the gradients of backwards to come."""
        context = self._task.context
        self.current = context.gradients.begin(context.copies, find())
        return self.current

    def backward(self, grads: OfOutputs, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside."""
        program, batch = self._task.program, self._batch
        self._seat.reached = reached
        # Those of an earlier backward of this call have been handed over.
        self._seat.input_grads.clear()
        batch.begin_backward({key: grad for key, grad in grads.items() if isinstance(key, int)})

        def seed(microbatch: int, value: int) -> Tensor | None:
            known = grads.get((microbatch, value))
            return batch.output_grad(microbatch, value) if known is None else known

        self._executor.run(
            program.backward,
            self.current,
            seed,
            first_record=len(program.forward),
            keep_graph=keep_graph,
            reduce=reduce,
        )
        self.input_grads = batch.input_grads(self._seat.input_grads)

    def release(self) -> None:
        """Drops all tensors."""
        self._seat.release()
        self._batch.release()
        self.outputs, self.input_grads = {}, {}
