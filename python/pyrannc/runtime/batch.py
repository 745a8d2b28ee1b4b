"""A batch on its way: inputs to the Stages, outputs back to their ranks, and the gradients of both the other way.

A rank's own batch holds a tensor for each Value; a Stage holds one for each microbatch and Value. The Program's
Transfers say which rows of the one are which of the other. What stays on this rank is not copied; what does not has
messages among the Actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyrannc.core.partition import RowDim
from pyrannc.core.program import Kind, Message, RankProgram, Recv, Rows, Send, Transfer
from pyrannc.job.exchange import Work
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.rows import join_rows, local_rows, take_rows

OfBatch: TypeAlias = Mapping[int, Tensor]
"""Tensors of this rank's own batch, by Value."""
OfStage: TypeAlias = Mapping[tuple[int, int], Tensor]
"""Tensors of this rank's Stage, by microbatch and Value; what has no rows stands under microbatch 0."""


class _Arrival(NamedTuple):
    """Rows of a microbatch, once its work is done."""

    microbatch: int
    rows: Rows
    tensor: Tensor
    work: Work


class Batch:
    """The batch of one run.

    Args:
        context: the rank's Stage.
        program: which rows go where.
        inputs: the rank's own.

    Attributes:
        output_grads: the gradients of the rank's own outputs, weighted, while backwards run that begin with them.
    """

    def __init__(self, context: StageContext, program: RankProgram, inputs: OfBatch) -> None:
        self._context = context
        self._facts = context.facts
        self._program = program
        self._inputs = {value: tensor.detach() for value, tensor in inputs.items()}
        # An input that the model hands through is this rank's own already.
        self._made = {part.value: part.row_dim for part in context.parts.outputs if part.input is None}
        self._staying_inputs = _staying(program.inputs)
        self._staying_outputs = _staying(program.outputs)
        self._arrived: dict[tuple[Kind, int], list[_Arrival]] = defaultdict(list)
        self._whole: dict[int, Tensor] = {}
        self.output_grads: OfBatch = {}

    # Messages

    def send(self, message: Send, outputs: OfStage, input_grads: OfStage) -> None:
        """Starts to send.

        Args:
            outputs: made on this rank.
            input_grads: likewise.
        """
        tensors = []
        for piece in message.pieces:
            if not self._moves(message.kind, piece.value):
                continue
            microbatch, value, rows = message.microbatch, piece.value, piece.rows
            if message.kind == "input":
                part = self._of_batch(self._inputs, value, microbatch, rows, self._input_dim(value))
            elif message.kind == "output_grad":
                part = self._of_batch(self.output_grads, value, microbatch, rows, self._made[value])
            elif message.kind == "output":
                part = self._of_stage(outputs, value, microbatch, rows, self._made[value])
            else:
                part = self._of_stage(input_grads, value, microbatch, rows, self._input_dim(value))
            tensors.append(part.contiguous())
        self._channels(message).send(message.peer, tensors, window=None)

    def receive(self, message: Recv) -> None:
        """Starts to receive; what needs it waits for it."""
        for piece in message.pieces:
            if self._moves(message.kind, piece.value):
                facts = self._facts.values[piece.value]
                shape = facts.shape_at(piece.rows[1] - piece.rows[0])
                tensor = torch.empty(shape, dtype=facts.dtype, device=self._context.device)
                work = self._channels(message).receive(message.peer, tensor)
                arrival = _Arrival(message.microbatch, piece.rows, tensor, work)
                self._arrived[message.kind, piece.value].append(arrival)

    def _moves(self, kind: Kind, value: int) -> bool:
        """False for gradients of what nothing was computed from, on any rank."""
        return kind != "output_grad" or value in self.output_grads

    def _channels(self, message: Message) -> Channels:
        return self._context.batch_channels["input_grads" if message.kind == "input_grad" else "batch"]

    def _take(self, kind: Kind, value: int, microbatch: int | None = None) -> list[tuple[int, Rows, Tensor]]:
        """What has arrived of a Value, of one microbatch or of all."""
        known = self._arrived[kind, value]
        taken = [arrival for arrival in known if microbatch in (None, arrival.microbatch)]
        self._arrived[kind, value] = [arrival for arrival in known if microbatch not in (None, arrival.microbatch)]
        for arrival in taken:
            arrival.work.wait()
        return [(arrival.microbatch, arrival.rows, arrival.tensor) for arrival in taken]

    # To the Stage

    def input(self, microbatch: int, value: int) -> Tensor:
        """An input of the Stage."""
        row_dim = self._input_dim(value)
        if row_dim is not None:
            return self._stage_rows("input", self._inputs, microbatch, value, row_dim)
        if value not in self._whole:
            arrived = self._take("input", value)
            self._whole[value] = arrived[0][-1] if arrived else self._inputs[value]
        return self._whole[value]

    def output_grad(self, microbatch: int, value: int) -> Tensor | None:
        """The gradient of an output of the Stage with rows, if one came back."""
        row_dim = self._made[value]
        if value not in self.output_grads or row_dim is None:
            return None
        return self._stage_rows("output_grad", self.output_grads, microbatch, value, row_dim)

    def _stage_rows(self, kind: Kind, own: OfBatch, microbatch: int, value: int, row_dim: RowDim) -> Tensor:
        """A microbatch's rows of what comes from the ranks' batches."""
        staying = self._staying_inputs if kind == "input" else self._staying_outputs
        pieces = [(rows, tensor) for _, rows, tensor in self._take(kind, value, microbatch)]
        for transfer in staying.get(value, ()):
            if transfer.microbatch == microbatch:
                pieces.append((transfer.rows, self._of_batch(own, value, microbatch, transfer.rows, row_dim)))
        return join_rows(pieces, row_dim)

    def _of_batch(self, own: OfBatch, value: int, microbatch: int, rows: Rows, row_dim: RowDim | None) -> Tensor:
        if row_dim is None:
            return own[value]
        return take_rows(own[value], row_dim, local_rows(self._program.slices, microbatch, rows))

    # Back to the ranks

    def outputs(self, made: OfStage) -> dict[int, Tensor]:
        """The outputs with rows that some Stage makes, for this rank's rows.

        Args:
            made: on this rank.
        """
        return {value: self._output(value, dim, made) for value, dim in self._made.items() if dim is not None}

    def _output(self, value: int, row_dim: RowDim, made: OfStage) -> Tensor:
        pieces = [((microbatch, rows[0]), tensor) for microbatch, rows, tensor in self._take("output", value)]
        for transfer in self._staying_outputs.get(value, ()):
            own = self._of_stage(made, value, transfer.microbatch, transfer.rows, row_dim)
            pieces.append(((transfer.microbatch, transfer.rows[0]), own))
        if not pieces:
            facts = self._facts.values[value]
            return torch.empty(facts.shape_at(0), dtype=facts.dtype, device=self._context.device)
        return join_rows(pieces, row_dim)

    def input_grads(self, made: OfStage) -> dict[int, Tensor]:
        """Gradients of this rank's own inputs, of those that some Stage makes any of.

        Args:
            made: on this rank.
        """
        own = {}
        for value, tensor in self._inputs.items():
            if self._facts.values[value].requires_grad:
                own[value] = torch.zeros_like(tensor)
                self._add_input_grads(own[value], value, made)
        return own

    def _add_input_grads(self, own: Tensor, value: int, made: OfStage) -> None:
        row_dim = self._input_dim(value)
        pieces = self._take("input_grad", value)
        for transfer in self._staying_inputs.get(value, ()):
            microbatch, rows = transfer.microbatch, transfer.rows
            pieces.append((microbatch, rows, self._of_stage(made, value, microbatch, rows, row_dim)))
        for microbatch, rows, grad in pieces:
            target = own
            if row_dim is not None:
                target = take_rows(own, row_dim, local_rows(self._program.slices, microbatch, rows))
            target.add_(grad)

    def _of_stage(self, made: OfStage, value: int, microbatch: int, rows: Rows, row_dim: RowDim | None) -> Tensor:
        if row_dim is None:
            return made[0, value]
        # Counted from the first row that this Replica computes of the microbatch.
        first = self._program.rows[microbatch][0]
        return take_rows(made[microbatch, value], row_dim, (rows[0] - first, rows[1] - first))

    def _input_dim(self, value: int) -> RowDim | None:
        return self._facts.values[value].row_dim

    def release(self) -> None:
        """Drops all tensors."""
        self._inputs, self._whole, self.output_grads = {}, {}, {}
        self._arrived.clear()


def _staying(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    """What stays on this rank, by Value."""
    found: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if transfer.src == transfer.dst:
            found[transfer.value].append(transfer)
    return found
