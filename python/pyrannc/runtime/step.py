"""One call of the model: inputs in, the Actions, outputs back, gradients when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyrannc.call.variant import Variant
from pyrannc.core.partition import OutputPart
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree
from pyrannc.job.faults import collective
from pyrannc.runtime.batch import Batch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.handover import hand_over
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.seat import Seat
from pyrannc.store.gradients import GradientSet


@dataclass(frozen=True)
class StepOptions:
    """How a step treats gradients.

    Attributes:
        reduce: sum gradients over ranks.
        keep_graph: backward may be called again.
    """

    reduce: bool
    keep_graph: bool


class Step:
    """One call on one rank.

    Args:
        context: the rank's Stage.
        program: what the rank does.
        inputs: the local tensors, in the order of the Graph's inputs.
        number: of the step, equal on all ranks.
        variant: the captured call.
    """

    def __init__(
        self,
        context: StageContext,
        program: RankProgram,
        inputs: Sequence[Tensor],
        number: int,
        variant: Variant,
        options: StepOptions,
    ) -> None:
        self._context = context
        self._program = program
        self._inputs = dict(zip(context.facts.inputs, inputs, strict=True))
        self._variant = variant
        self._loss = variant.loss if program.call == "whole" else None
        self._options = options
        self._current: GradientSet | None = None
        self._input_grads: dict[int, Tensor] = {}
        self._done = False
        self._made = _made(context.parts.outputs)
        self._weights = Weights(context.facts, program, self._made, self._loss, context.device)
        self._batch = Batch(context.facts, program, self._made, context.device)
        marks = context.timing.begin(program)
        with context.record.step(program), self._generator():
            self._seat = Seat(context, program, number, self._batch.bring_inputs(self._inputs), marks)
            self._executor = Executor(context, program, self._seat, marks)
            if program.call == "whole":
                self._current = context.gradients.begin()
            self._executor.run(program.forward, self._current, self._weights.of_loss, reduce=options.reduce)
            context.record.enter_outputs(program)
            averages = self._weights.averages(self._seat.outputs)
            self._values = self._batch.bring_outputs(self._seat.outputs, averages)
            self._shapes = [(tensor.shape, tensor.dtype) for tensor in self._values]
            if program.call == "whole":
                self._finish_gradients()

    def _generator(self) -> Any:
        return self._context.randomness.borrowed() if self._context.code.random else nullcontext()

    def results(self) -> list[Tensor]:
        """The outputs, in the order of the Graph's outputs, with gradients if the call trains."""
        # The step must not keep what it returns: the autograd graph of that keeps the step.
        made, self._values = self._values, []
        if self._program.call != "forward":
            made = hand_over(made, self._constant(made), self._sources(), self.backward)
        values = dict(self._inputs)
        values.update((part.value, tensor) for part, tensor in zip(self._made, made, strict=True))
        return [values[value] for value in self._context.facts.outputs]

    def _constant(self, made: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that no gradient comes back for."""
        facts = self._context.facts.values
        return [tensor for part, tensor in zip(self._made, made, strict=True) if not facts[part.value].requires_grad]

    def _sources(self) -> list[Tensor]:
        """The inputs that gradients go back to."""
        return [tensor for tensor in self._inputs.values() if tensor.requires_grad]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Hands gradients to the parameters, given those of the distinct outputs; returns those of the inputs."""
        if self._done:
            raise RaNNCError(
                "backward() was called a second time for one call of the model; "
                "call pyrannc.keep_graph(True) before the model if that is meant"
            )
        self._done = not self._options.keep_graph
        scale = self._weights.scale(grads)
        if scale is None:
            self._run_backward(grads)
        assert self._current is not None, "a call that trains has gradients"
        assert self._variant.active is not None, "the first backward finds the active parameters"
        self._context.gradients.deliver(
            self._current, self._variant.active, scale, keep=self._options.keep_graph, reduced=self._options.reduce
        )
        sources = [value for value, tensor in self._inputs.items() if tensor.requires_grad]
        found = [self._input_grads.get(value) for value in sources]
        return [grad if grad is None or scale is None else grad * scale.to(grad.dtype) for grad in found]

    def _run_backward(self, grads: Sequence[Tensor | None]) -> None:
        context, program, options = self._context, self._program, self._options
        with collective("loss.backward()"), context.record.step(program), self._generator():
            seeds = self._seeds(grads)
            self._current = context.gradients.begin()
            self._executor.run(
                program.backward,
                self._current,
                lambda microbatch, value: seeds.get((microbatch, value)),
                first_record=len(program.forward),
                keep_graph=options.keep_graph,
                reduce=options.reduce,
            )
            self._finish_gradients()

    def _seeds(self, grads: Sequence[Tensor | None]) -> dict[tuple[int, int], Tensor]:
        """The gradient of each output of this Stage, by microbatch and Value."""
        own = self._weights.own_gradients(grads, self._shapes)
        seeds = self._weights.seeds_of_averages(own)
        if self._program.gather_inputs:
            return {**seeds, **self._batch.bring_output_grads(own)}
        return {**seeds, **self._weights.local_seeds(own)}

    def _finish_gradients(self) -> None:
        self._input_grads = self._batch.bring_input_grads(self._inputs, self._seat.input_grads)
        if not self._options.keep_graph:
            self._seat.release()
        if self._variant.active is None:
            assert self._current is not None, "the backward has begun"
            found: list[set[str]] = agree.gather_objects(self._current.touched)
            self._variant.active = set().union(*found)


def _made(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The outputs that some Stage makes, each once."""
    return list({part.value: part for part in parts if part.input is None}.values())
