"""A batch on its way: inputs to the Stages, outputs back to their ranks, and the gradients of both the other way.

A rank's own batch holds a tensor for each Value; a Stage holds one for each microbatch and Value. The Program's
Transfers say which rows of the one are which of the other. What stays on this rank is not copied; what does not is in
exchanges among the Actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pyrannc.core.partition import RowDim
from pyrannc.core.program import Exchange, Kind, Parcel, RankProgram, Rows, Transfer
from pyrannc.job.exchange import Work, dense
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.rows import Pieces, join_rows, local_rows, take_rows

OfBatch: TypeAlias = Mapping[int, Tensor]
"""Tensors of this rank's own batch, by Value."""
OfStage: TypeAlias = Mapping[tuple[int, int], Tensor]
"""Tensors of this rank's Stage, by microbatch and Value; what has no rows stands under microbatch 0."""


class _Arrival(NamedTuple):
    """Rows of a microbatch, once the exchange with this number is done."""

    exchange: int
    microbatch: int
    rows: Rows
    tensor: Tensor


class Batch:
    """The batch of one run.

    Args:
        context: the rank's Stage.
        program: which rows go where.
        inputs: the rank's own.
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
        self._under_way: list[tuple[list[Work], list[Tensor]]] = []
        self._output_grads: OfBatch = {}

    def begin_backward(self, output_grads: OfBatch) -> None:
        """Backwards begin with these gradients of the rank's own outputs, weighted; what came for earlier ones goes."""
        self._output_grads = output_grads
        for value in self._made:
            self._arrived.pop(("output_grad", value), None)

    # Exchanges

    def exchange(self, exchange: Exchange, outputs: OfStage, input_grads: OfStage) -> None:
        """Starts to give and to take.

        Args:
            outputs: made on this rank.
            input_grads: likewise.
        """
        kind, microbatch = exchange.kind, exchange.microbatch

        def part(value: int, rows: Rows) -> Tensor:
            if kind == "input":
                return self._of_batch(self._inputs, value, microbatch, rows, self._input_dim(value))
            if kind == "output_grad":
                return self._of_batch(self._output_grads, value, microbatch, rows, self._made[value])
            if kind == "output":
                return self._of_stage(outputs, value, microbatch, rows, self._made[value])
            return self._of_stage(input_grads, value, microbatch, rows, self._input_dim(value))

        sends = [(peer, dense(part(value, rows))) for peer, value, rows in self._moving(kind, exchange.sends)]
        receives = []
        for peer, value, rows in self._moving(kind, exchange.recvs):
            facts = self._facts.values[value]
            shape = facts.shape_at(rows[1] - rows[0])
            tensor = torch.empty(shape, dtype=facts.dtype, device=self._context.device)
            receives.append((peer, tensor))
            arrival = _Arrival(len(self._under_way), microbatch, rows, tensor)
            self._arrived[kind, value].append(arrival)
        works = self._context.exchanges.start(sends, receives)
        self._under_way.append((works, [tensor for _, tensor in sends]))

    def _moving(self, kind: Kind, parcels: Sequence[Parcel]) -> Iterator[tuple[int, int, Rows]]:
        """Peer, Value and rows of what moves, without gradients of what nothing was computed from, on any rank."""
        for parcel in parcels:
            for piece in parcel.pieces:
                if kind != "output_grad" or piece.value in self._output_grads:
                    yield parcel.peer, piece.value, piece.rows

    def _await(self, number: int) -> None:
        """Waits for an exchange (on a GPU: makes the stream wait)."""
        works, _ = self._under_way[number]
        for work in works:
            work.wait()
        self._under_way[number] = [], []

    def finish(self) -> None:
        """Waits for all of them."""
        for number in range(len(self._under_way)):
            self._await(number)

    def _take(self, kind: Kind, value: int, microbatch: int | None = None) -> list[tuple[int, Rows, Tensor]]:
        """What has arrived of a Value, of one microbatch or of all."""
        known = self._arrived[kind, value]
        taken = [arrival for arrival in known if microbatch in (None, arrival.microbatch)]
        self._arrived[kind, value] = [arrival for arrival in known if microbatch not in (None, arrival.microbatch)]
        for arrival in taken:
            self._await(arrival.exchange)
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
        if value not in self._output_grads or row_dim is None:
            return None
        return self._stage_rows("output_grad", self._output_grads, microbatch, value, row_dim)

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

    def kept(self, output: Tensor) -> Tensor:
        """An output of a microbatch as it is kept to the end of the run.

        One that is a part of a larger tensor (compilers pad products) would be copied to be sent, and its rows that
        stay here would keep all of the larger one.
        """
        if not self._program.exchanges or 0 in output.stride():
            return output
        return output.clone() if output.untyped_storage().nbytes() > output.nbytes else output

    def outputs(self, made: OfStage) -> dict[int, Pieces]:
        """The outputs with rows that some Stage makes, for this rank's rows, as they come.

        Args:
            made: on this rank.
        """
        return {value: self._output(value, dim, made) for value, dim in self._made.items() if dim is not None}

    def _output(self, value: int, row_dim: RowDim, made: OfStage) -> Pieces:
        pieces = [((microbatch, rows[0]), tensor) for microbatch, rows, tensor in self._take("output", value)]
        for transfer in self._staying_outputs.get(value, ()):
            own = self._of_stage(made, value, transfer.microbatch, transfer.rows, row_dim)
            pieces.append(((transfer.microbatch, transfer.rows[0]), own))
        if not pieces:
            facts = self._facts.values[value]
            return Pieces([torch.empty(facts.shape_at(0), dtype=facts.dtype, device=self._context.device)])
        return Pieces.of(pieces, row_dim)

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
        self._inputs, self._whole, self._output_grads = {}, {}, {}
        self._arrived.clear()
        self._under_way.clear()


def _staying(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    """What stays on this rank, by Value."""
    found: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        if transfer.src == transfer.dst:
            found[transfer.value].append(transfer)
    return found
