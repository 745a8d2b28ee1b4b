"""One call of the model: inputs in, the schedule, outputs back, gradients when asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyrannc.call.variant import Variant
from pyrannc.core.program import OutputPart, RankProgram, RowDim, Rows, Transfer
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.runtime.executor import StageContext, StepExecution
from pyrannc.runtime.rows import Shape, join_rows, local_rows, move_rows, take_rows
from pyrannc.store.gradients import GradientSet

_BATCH_FIRST = RowDim(0, 1)


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
        key: what random numbers come from, equal on all ranks.
        variant: the captured call.
    """

    def __init__(
        self,
        context: StageContext,
        program: RankProgram,
        inputs: Sequence[Tensor],
        key: int,
        variant: Variant,
        options: StepOptions,
    ) -> None:
        self._context = context
        self._program = program
        self._inputs = dict(zip(context.facts.inputs, inputs, strict=True))
        self._variant = variant
        self._loss = variant.loss if program.mode == "train_1f1b" else None
        self._options = options
        self._current: GradientSet | None = None
        self._input_grads: dict[int, Tensor] = {}
        self._done = False
        context.randomness.begin(key)
        marks = context.timing.begin(program)
        with context.record.step(program), self._generator():
            self._execution = StepExecution(context, program, self._bring_inputs(), marks)
            if program.mode == "train_1f1b":
                self._current = context.gradients.begin()
            self._execution.run(program.forward, self._current, self._weight_of_loss, reduce=options.reduce)
            context.record.enter_outputs(program)
            self._parts = _made(context.parts.outputs)
            self._values = self._bring_outputs()
            self._shapes = [(tensor.shape, tensor.dtype) for tensor in self._values]
            if program.mode == "train_1f1b":
                self._finish_gradients()

    def _generator(self) -> Any:
        return self._context.randomness.borrowed() if self._context.code.seeds_generator else nullcontext()

    def results(self) -> list[Tensor]:
        """The outputs, in the order of the Graph's outputs, with gradients if the call trains."""
        # The step must not keep what it returns: the autograd graph of that keeps the step.
        made, self._values = self._values, []
        if self._program.mode != "forward":
            sources = [tensor for tensor in self._inputs.values() if tensor.requires_grad]
            anchor = torch.empty(0, requires_grad=True)
            constant = [tensor for part, tensor in zip(self._parts, made, strict=True) if not self._flows(part)]
            made = _Handover.apply(self, made, constant, anchor, *sources)  # type: ignore[no-untyped-call]  # torch has no types for it
        values = dict(self._inputs)
        values.update((part.value, tensor) for part, tensor in zip(self._parts, made, strict=True))
        return [values[value] for value in self._context.facts.outputs]

    # Inputs

    def _bring_inputs(self) -> dict[tuple[int, int], Tensor]:
        """The Stage's inputs by microbatch and Value."""
        program, context = self._program, self._context
        arrived = move_rows(program.inputs, program.rank, self._input_rows, self._shape, context.device)
        pieces: dict[tuple[int, int], list[tuple[Rows, Tensor]]] = defaultdict(list)
        whole: dict[int, Tensor] = {}
        for transfer, tensor in arrived:
            if self._has_rows(transfer.value):
                pieces[transfer.microbatch, transfer.value].append((transfer.rows, tensor))
            else:
                whole[transfer.value] = tensor
        inputs = {key: join_rows(found, _BATCH_FIRST) for key, found in pieces.items()}
        for value, tensor in whole.items():
            inputs.update({(microbatch, value): tensor for microbatch in range(len(program.rows))})
        return inputs

    def _has_rows(self, value: int) -> bool:
        shape = self._context.facts.values[value].shape
        return bool(shape) and shape[0] == (1, 0)

    def _input_rows(self, transfer: Transfer) -> Tensor:
        tensor = self._inputs[transfer.value].detach()
        if not self._has_rows(transfer.value):
            return tensor
        return take_rows(tensor, _BATCH_FIRST, local_rows(self._program.slices, transfer))

    def _shape(self, transfer: Transfer) -> Shape:
        facts = self._context.facts.values[transfer.value]
        return facts.shape_at(transfer.rows[1] - transfer.rows[0]), facts.dtype

    def _rows_here(self, transfer: Transfer) -> Rows:
        """The rows of a transfer, counted from the first that this Replica computes of the microbatch."""
        first = self._program.rows[transfer.microbatch][0]
        return transfer.rows[0] - first, transfer.rows[1] - first

    # Outputs

    def _bring_outputs(self) -> list[Tensor]:
        """The distinct outputs for this rank's rows, without gradients."""
        averages = self._averages()
        pieces: dict[int, list[tuple[Rows, Tensor]]] = defaultdict(list)
        program = self._program
        # An input that the model hands through is this rank's own already.
        made = {part.value for part in self._parts}
        transfers = [transfer for transfer in program.outputs if transfer.value in made]
        for transfer, tensor in move_rows(
            transfers, program.rank, self._output_rows, self._shape, self._context.device
        ):
            pieces[transfer.value].append(((transfer.microbatch, transfer.rows[0]), tensor))
        return [self._output(part, averages, pieces) for part in self._parts]

    def _output(
        self, part: OutputPart, averages: dict[int, Tensor], pieces: dict[int, list[tuple[Rows, Tensor]]]
    ) -> Tensor:
        if part.row_dim is None:
            return averages[part.value]
        if part.value not in pieces:
            facts = self._context.facts.values[part.value]
            return torch.empty(facts.shape_at(0), dtype=facts.dtype, device=self._context.device)
        return join_rows(pieces[part.value], part.row_dim)

    def _output_rows(self, transfer: Transfer) -> Tensor:
        tensor = self._execution.outputs[transfer.microbatch, transfer.value]
        return take_rows(tensor, self._row_dim(transfer.value), self._rows_here(transfer))

    def _row_dim(self, value: int) -> RowDim:
        row_dim = next(part.row_dim for part in self._parts if part.value == value)
        assert row_dim is not None, "only outputs with rows are transferred"
        return row_dim

    def _averages(self) -> dict[int, Tensor]:
        """Outputs without rows, averaged over the global batch."""
        context = self._context
        averaged = [part for part in self._parts if part.row_dim is None]
        totals: dict[int, Tensor] = {}
        for part in averaged:
            facts = context.facts.values[part.value]
            totals[part.value] = torch.zeros(facts.shape_at(0), dtype=facts.dtype, device=context.device)
        for (microbatch, value), tensor in self._execution.outputs.items():
            if value in totals:
                totals[value].add_(tensor, alpha=self._share(microbatch))
        if process.get_world_size() > 1:
            for total in totals.values():
                dist.all_reduce(total, group=process.world())
        return totals

    def _share(self, microbatch: int) -> float:
        """This rank's rows of the microbatch, as a share of the global batch."""
        lo, hi = self._program.rows[microbatch]
        return (hi - lo) / self._program.total_rows

    # Gradients

    def _weight_of_loss(self, microbatch: int, value: int) -> Tensor | None:
        if value != self._loss:
            return None
        facts = self._context.facts.values[value]
        return torch.full((), self._share(microbatch), dtype=facts.dtype, device=self._context.device)

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Hands gradients to the parameters, given those of the distinct outputs; returns those of the inputs."""
        if self._done:
            raise RaNNCError(
                "backward() was called a second time for one call of the model; "
                "call pyrannc.keep_graph(True) before the model if that is meant"
            )
        self._done = not self._options.keep_graph
        scale = None
        if self._loss is not None:
            scale = self._loss_gradient(grads)
        else:
            self._run_backward(grads)
        assert self._current is not None, "a call that trains has gradients"
        assert self._variant.active is not None, "the first backward finds the active parameters"
        self._context.gradients.deliver(
            self._current, self._variant.active, scale, keep=self._options.keep_graph, reduced=self._options.reduce
        )
        sources = [value for value, tensor in self._inputs.items() if tensor.requires_grad]
        found = [self._input_grads.get(value) for value in sources]
        return [grad if grad is None or scale is None else grad * scale.to(grad.dtype) for grad in found]

    def _loss_gradient(self, grads: Sequence[Tensor | None]) -> Tensor:
        for part, grad in zip(self._parts, grads, strict=True):
            if grad is not None and part.value != self._loss:
                name = self._context.facts.values[part.value].name
                raise RaNNCError(
                    f'a gradient came back for output "{name}" besides the loss. The model returned one scalar '
                    "loss, so its backward ran inside the call. Compute everything "
                    "that you differentiate inside the model, or return no scalar from it"
                )
        loss = next(index for index, part in enumerate(self._parts) if part.value == self._loss)
        grad = grads[loss]
        assert grad is not None, "only the loss can have started this backward"
        return grad

    def _run_backward(self, grads: Sequence[Tensor | None]) -> None:
        context, program, options = self._context, self._program, self._options
        with context.record.step(program), self._generator():
            seeds = self._bring_output_grads(grads)
            self._current = context.gradients.begin()
            self._execution.run(
                program.backward,
                self._current,
                lambda microbatch, value: seeds.get((microbatch, value)),
                first_record=len(program.forward),
                keep_graph=options.keep_graph,
                reduce=options.reduce,
            )
            self._finish_gradients()

    def _bring_output_grads(self, grads: Sequence[Tensor | None]) -> dict[tuple[int, int], Tensor]:
        """The gradient of each output of this Stage, by microbatch and Value."""
        own = {}
        weight = self._weight_of_local_batch()
        for part, grad, (shape, dtype) in zip(self._parts, grads, self._shapes, strict=True):
            if grad is not None:
                own[part.value] = grad * weight
            elif self._flows(part):
                own[part.value] = torch.zeros(shape, dtype=dtype, device=self._context.device)
        seeds = self._seeds_of_averages(own)
        if not self._program.gather_inputs:
            return {**seeds, **self._local_seeds(own)}
        transfers = [transfer for transfer in self._program.outputs if transfer.value in own]
        pieces: dict[tuple[int, int], list[tuple[Rows, Tensor]]] = defaultdict(list)
        for transfer, tensor in move_rows(
            transfers,
            self._program.rank,
            lambda transfer: take_rows(
                own[transfer.value], self._row_dim(transfer.value), local_rows(self._program.slices, transfer)
            ),
            self._shape,
            self._context.device,
            reverse=True,
        ):
            pieces[transfer.microbatch, transfer.value].append((transfer.rows, tensor))
        rows = {key: join_rows(found, self._row_dim(key[1])) for key, found in pieces.items()}
        return {**seeds, **rows}

    def _weight_of_local_batch(self) -> float:
        """Ranks average their losses by their rows, as one process with the whole batch would."""
        if not self._program.gather_inputs:
            return 1.0
        rows = sum(part.local[1] - part.local[0] for part in self._program.slices)
        return rows / self._program.total_rows

    def _seeds_of_averages(self, own: dict[int, Tensor]) -> dict[tuple[int, int], Tensor]:
        seeds = {}
        for part in self._parts:
            if part.value in own and part.row_dim is None:
                if self._program.gather_inputs and process.get_world_size() > 1:
                    dist.all_reduce(own[part.value], group=process.world())
                for microbatch in range(len(self._program.rows)):
                    seeds[microbatch, part.value] = own[part.value] * self._share(microbatch)
        return seeds

    def _local_seeds(self, own: dict[int, Tensor]) -> dict[tuple[int, int], Tensor]:
        """This rank's rows of output gradients that it has in full."""
        seeds = {}
        start = 0
        for microbatch, rows in enumerate(self._program.microbatches):
            lo, hi = self._program.rows[microbatch]
            for value, grad in own.items():
                part = next(part for part in self._parts if part.value == value)
                if part.row_dim is not None:
                    seeds[microbatch, value] = take_rows(grad, part.row_dim, (start + lo, start + hi))
            start += rows
        return seeds

    def _flows(self, part: OutputPart) -> bool:
        """True when a gradient may come back for an output."""
        return self._context.facts.values[part.value].requires_grad

    def _finish_gradients(self) -> None:
        self._input_grads = self._bring_input_grads()
        if not self._options.keep_graph:
            self._execution.release()
        if self._variant.active is None:
            assert self._current is not None, "the backward has begun"
            found: list[set[str]] = agree.gather_objects(self._current.touched)
            self._variant.active = set().union(*found)

    def _bring_input_grads(self) -> dict[int, Tensor]:
        """Gradients of this rank's own inputs, by Value."""
        facts = self._context.facts
        transfers = [item for item in self._program.inputs if facts.values[item.value].requires_grad]
        own = {value: torch.zeros_like(tensor) for value, tensor in self._inputs.items() if tensor.requires_grad}
        for transfer, grad in move_rows(
            transfers, self._program.rank, self._input_grad, self._shape, self._context.device, reverse=True
        ):
            target = own[transfer.value]
            if self._has_rows(transfer.value):
                target = take_rows(target, _BATCH_FIRST, local_rows(self._program.slices, transfer))
            target.add_(grad)
        return own

    def _input_grad(self, transfer: Transfer) -> Tensor:
        if not self._has_rows(transfer.value):
            return self._execution.input_grads[0, transfer.value]
        grad = self._execution.input_grads[transfer.microbatch, transfer.value]
        return take_rows(grad, _BATCH_FIRST, self._rows_here(transfer))


class _Handover(torch.autograd.Function):
    """Joins a step with the user's autograd graph: its outputs lead back to the step's own backward."""

    @staticmethod
    def forward(
        ctx: Any, step: Step, made: list[Tensor], constant: list[Tensor], anchor: Tensor, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, None, *ctx.step.backward(grads))


def _made(parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The outputs that some Stage makes, each once."""
    return list({part.value: part for part in parts if part.input is None}.values())
