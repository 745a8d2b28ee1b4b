"""The Actions of one call on one rank, from the Stage's inputs to its outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from pyrannc.core.program import RankProgram
from pyrannc.runtime import rehearsal
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.join import Reductions
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.seat import Seat
from pyrannc.runtime.timing import Marks
from pyrannc.store.gradient_set import GradientSet

OfStage: TypeAlias = Mapping[tuple[int, int], Tensor]
"""Tensors by microbatch and Value."""


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

    @property
    def outputs(self) -> OfStage:
        """Of the model, made on this rank."""

    @property
    def totals(self) -> Mapping[int, Tensor]:
        """The outputs without rows, of the global batch, by Value."""

    @property
    def input_grads(self) -> OfStage:
        """Gradients of the inputs; of one without rows a sum over microbatches, under microbatch 0."""

    def backward(self, seeds: OfStage, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside; :meth:`begin_backward` comes before.

        Args:
            seeds: the gradients of outputs.
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
    """

    def __init__(self, task: Task, marks: Marks | None, *, lends: bool = True) -> None:
        self._task = task
        self._marks = marks
        self._lends = lends
        self.current: GradientSet | None = None
        self.totals: Mapping[int, Tensor] = {}

    def forward(self, inputs: OfStage, inside: Mapping[int, Tensor], current: GradientSet | None = None) -> None:
        """Runs the Actions of the call.

        Args:
            inputs: of the Stage.
            inside: the gradients with which backwards inside the call start, by Value.
            current: where to put gradients; by default where nobody holds any.
        """
        task, context, program = self._task, self._task.context, self._task.program
        context.gradients.working.refresh(context.copied.values())
        rehearsal.rehearse_once(context, program, inputs, task.weights)
        self._seat = Seat(context, program, inputs, self._marks, lends=self._lends)
        self._executor = Executor(context, self._seat, self._marks)
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
        self.totals = sent.pop().finish()

    def _send_totals(self) -> Reductions:
        """Starts to sum outputs without rows over the ranks, of which none waits before it needs them."""
        totals = self._task.weights.totals(self._seat.outputs)
        totals.send(self._task.context.totals)
        return totals

    @property
    def outputs(self) -> OfStage:
        """Of the model, made on this rank."""
        return self._seat.outputs

    @property
    def input_grads(self) -> OfStage:
        """Of the inputs."""
        return self._seat.input_grads

    def begin_backward(self, find: Callable[[], GradientSet | None]) -> GradientSet:
        """Room for the gradients of backwards to come."""
        context = self._task.context
        self.current = context.gradients.begin(context.copies, find())
        return self.current

    def backward(self, seeds: OfStage, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside."""
        program = self._task.program
        self._seat.reached = reached
        # Those of an earlier backward of this call have been handed over.
        self._seat.input_grads.clear()
        self._executor.run(
            program.backward,
            self.current,
            lambda microbatch, value: seeds.get((microbatch, value)),
            first_record=len(program.forward),
            keep_graph=keep_graph,
            reduce=reduce,
        )

    def release(self) -> None:
        """Drops all tensors."""
        self._seat.release()
