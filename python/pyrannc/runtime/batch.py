"""A batch on its way: inputs to the Stages, outputs back to their ranks, and the gradients of both the other way.

A rank's own batch holds a tensor for each Value; a Stage holds one for each microbatch and Value. Whatever has rows
goes from the one to the other piece by piece, as the Program's Transfers say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import OutputPart, RowDim
from pyrannc.core.program import RankProgram, Rows, Transfer
from pyrannc.runtime.rows import Shape, join_rows, local_rows, move_rows, take_rows

OfBatch = Mapping[int, Tensor]
"""Tensors of this rank's own batch, by Value."""
OfStage = Mapping[tuple[int, int], Tensor]
"""Tensors of this rank's Stage, by microbatch and Value; what has no rows stands under microbatch 0."""


class Batch:
    """The batch of one call.

    Args:
        facts: the Graph.
        program: the Transfers.
        made: the outputs that some Stage makes, each once.
        device: this rank's.
    """

    def __init__(
        self, facts: GraphFacts, program: RankProgram, made: Sequence[OutputPart], device: torch.device
    ) -> None:
        self._facts = facts
        self._program = program
        self._made = made
        self._device = device
        self._output_dims = {part.value: part.row_dim for part in made}
        # An input that the model hands through is this rank's own already.
        self._outputs = [transfer for transfer in program.outputs if transfer.value in self._output_dims]

    # To the Stage

    def bring_inputs(self, inputs: OfBatch) -> dict[tuple[int, int], Tensor]:
        """The Stage's inputs; those without rows for every microbatch."""
        detached = {value: tensor.detach() for value, tensor in inputs.items()}
        arrived = self._to_stage(self._program.inputs, detached, self._input_dim)
        whole = [value for _, value in arrived if self._input_dim(value) is None]
        for value in whole:
            tensor = arrived.pop((0, value))
            arrived.update({(microbatch, value): tensor for microbatch in range(len(self._program.rows))})
        return arrived

    def bring_output_grads(self, grads: OfBatch) -> dict[tuple[int, int], Tensor]:
        """The gradients of the Stage's outputs that have rows."""
        transfers = [transfer for transfer in self._outputs if transfer.value in grads]
        return self._to_stage(transfers, grads, self._output_dims.__getitem__, reverse=True)

    def _to_stage(
        self,
        transfers: Sequence[Transfer],
        tensors: OfBatch,
        row_dim: Callable[[int], RowDim | None],
        *,
        reverse: bool = False,
    ) -> dict[tuple[int, int], Tensor]:
        def take(transfer: Transfer) -> Tensor:
            dim = row_dim(transfer.value)
            tensor = tensors[transfer.value]
            return tensor if dim is None else take_rows(tensor, dim, local_rows(self._program.slices, transfer))

        pieces: dict[tuple[int, int], list[tuple[Rows, Tensor]]] = defaultdict(list)
        for transfer, tensor in self._move(transfers, take, reverse=reverse):
            microbatch = 0 if row_dim(transfer.value) is None else transfer.microbatch
            pieces[microbatch, transfer.value].append((transfer.rows, tensor))
        return {key: _joined(found, row_dim(key[1])) for key, found in pieces.items()}

    # Back to the ranks

    def bring_outputs(self, outputs: OfStage, totals: OfBatch) -> list[Tensor]:
        """The outputs that some Stage makes, for this rank's rows.

        Args:
            outputs: made on this rank.
            totals: the outputs without rows.
        """
        pieces: dict[int, list[tuple[Rows, Tensor]]] = defaultdict(list)
        for transfer, tensor in self._from_stage(self._outputs, outputs, self._output_dims.__getitem__):
            pieces[transfer.value].append(((transfer.microbatch, transfer.rows[0]), tensor))
        return [self._output(part, totals, pieces) for part in self._made]

    def _output(self, part: OutputPart, totals: OfBatch, pieces: Mapping[int, list[tuple[Rows, Tensor]]]) -> Tensor:
        if part.row_dim is None:
            return totals[part.value]
        if part.value not in pieces:
            facts = self._facts.values[part.value]
            return torch.empty(facts.shape_at(0), dtype=facts.dtype, device=self._device)
        return join_rows(pieces[part.value], part.row_dim)

    def bring_input_grads(self, inputs: OfBatch, grads: OfStage) -> dict[int, Tensor]:
        """Gradients of this rank's own inputs.

        Args:
            inputs: of this rank.
            grads: made on this rank.
        """
        transfers = [item for item in self._program.inputs if self._facts.values[item.value].requires_grad]
        own = {value: torch.zeros_like(tensor) for value, tensor in inputs.items() if tensor.requires_grad}
        for transfer, grad in self._from_stage(transfers, grads, self._input_dim, reverse=True):
            target = own[transfer.value]
            row_dim = self._input_dim(transfer.value)
            if row_dim is not None:
                target = take_rows(target, row_dim, local_rows(self._program.slices, transfer))
            target.add_(grad)
        return own

    def _from_stage(
        self,
        transfers: Sequence[Transfer],
        tensors: OfStage,
        row_dim: Callable[[int], RowDim | None],
        *,
        reverse: bool = False,
    ) -> list[tuple[Transfer, Tensor]]:
        def take(transfer: Transfer) -> Tensor:
            dim = row_dim(transfer.value)
            if dim is None:
                return tensors[0, transfer.value]
            # Counted from the first row that this Replica computes of the microbatch.
            first = self._program.rows[transfer.microbatch][0]
            rows = (transfer.rows[0] - first, transfer.rows[1] - first)
            return take_rows(tensors[transfer.microbatch, transfer.value], dim, rows)

        return self._move(transfers, take, reverse=reverse)

    # Both ways

    def _move(
        self, transfers: Sequence[Transfer], take: Callable[[Transfer], Tensor], *, reverse: bool
    ) -> list[tuple[Transfer, Tensor]]:
        return move_rows(transfers, self._program.rank, take, self._shape, self._device, reverse=reverse)

    def _shape(self, transfer: Transfer) -> Shape:
        facts = self._facts.values[transfer.value]
        return facts.shape_at(transfer.rows[1] - transfer.rows[0]), facts.dtype

    def _input_dim(self, value: int) -> RowDim | None:
        return self._facts.values[value].row_dim


def _joined(pieces: Sequence[tuple[Rows, Tensor]], row_dim: RowDim | None) -> Tensor:
    return pieces[-1][1] if row_dim is None else join_rows(pieces, row_dim)
