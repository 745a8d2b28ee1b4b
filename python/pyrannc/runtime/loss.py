"""What each rank's and microbatch's part counts in losses, and so in gradients.

Every output without rows is taken as a mean over rows: its parts are summed with weight ``rows / all rows``. The
gradients that the backwards start with carry the same weights, so that gradients are summed over microbatches and
ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import OutputPart
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.runtime.rows import take_rows


class Weights:
    """The weights of one call.

    Args:
        facts: the Graph.
        program: what the rank does.
        made: the outputs that some Stage makes, each once.
        loss: the Value of the loss, if its backward runs inside the call.
        device: this rank's.
    """

    def __init__(
        self,
        facts: GraphFacts,
        program: RankProgram,
        made: Sequence[OutputPart],
        loss: int | None,
        device: torch.device,
    ) -> None:
        self._facts = facts
        self._program = program
        self._made = made
        self._loss = loss
        self._device = device

    def share(self, microbatch: int) -> float:
        """This rank's rows of the microbatch, as a share of the global batch."""
        lo, hi = self._program.rows[microbatch]
        return (hi - lo) / self._program.total_rows

    def averages(self, outputs: Mapping[tuple[int, int], Tensor]) -> dict[int, Tensor]:
        """Outputs without rows, averaged over the global batch. All ranks call it.

        Args:
            outputs: made on this rank, by microbatch and Value.
        """
        totals: dict[int, Tensor] = {}
        for part in self._made:
            if part.row_dim is None:
                facts = self._facts.values[part.value]
                totals[part.value] = torch.zeros(facts.shape_at(0), dtype=facts.dtype, device=self._device)
        for (microbatch, value), tensor in outputs.items():
            if value in totals:
                totals[value].add_(tensor, alpha=self.share(microbatch))
        if process.get_world_size() > 1:
            for total in totals.values():
                sum_over_ranks(total)
        return totals

    # With the loss inside of the call

    def of_loss(self, microbatch: int, value: int) -> Tensor | None:
        """The gradient with which the backward of a microbatch starts."""
        if value != self._loss:
            return None
        facts = self._facts.values[value]
        return torch.full((), self.share(microbatch), dtype=facts.dtype, device=self._device)

    def scale(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of the loss, which all gradients have yet to be multiplied by; ``None`` for a loss outside.

        Args:
            grads: of the outputs, as they came back.

        Raises:
            RaNNCError: a gradient came back for another output.
        """
        if self._loss is None:
            return None
        for part, grad in zip(self._made, grads, strict=True):
            if grad is not None and part.value != self._loss:
                name = self._facts.values[part.value].name
                raise RaNNCError(
                    f'a gradient came back for output "{name}" besides the loss. The model returned one scalar '
                    "loss, so its backward ran inside the call. Compute everything "
                    "that you differentiate inside the model, or return no scalar from it"
                )
        loss = next(index for index, part in enumerate(self._made) if part.value == self._loss)
        grad = grads[loss]
        assert grad is not None, "only the loss can have started this backward"
        return grad

    # With the loss outside

    def own_gradients(
        self, grads: Sequence[Tensor | None], shapes: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> dict[int, Tensor]:
        """The gradients that came back for this rank's outputs, weighted, by Value.

        Args:
            grads: of the outputs; ``None`` for those that nothing was computed from.
            shapes: shape and type of the outputs.
        """
        own = {}
        weight = self._of_local_batch()
        for part, grad, (shape, dtype) in zip(self._made, grads, shapes, strict=True):
            if grad is not None:
                own[part.value] = grad * weight
            elif self._facts.values[part.value].requires_grad:
                own[part.value] = torch.zeros(shape, dtype=dtype, device=self._device)
        return own

    def _of_local_batch(self) -> float:
        """Ranks average their losses by their rows, as one process with the whole batch would."""
        if not self._program.gather_inputs:
            return 1.0
        rows = sum(part.local[1] - part.local[0] for part in self._program.slices)
        return rows / self._program.total_rows

    def seeds_of_averages(self, own: Mapping[int, Tensor]) -> dict[tuple[int, int], Tensor]:
        """The gradients of outputs without rows, by microbatch and Value. All ranks call it."""
        seeds = {}
        for part in self._made:
            if part.value in own and part.row_dim is None:
                if self._program.gather_inputs and process.get_world_size() > 1:
                    sum_over_ranks(own[part.value])
                for microbatch in range(len(self._program.rows)):
                    seeds[microbatch, part.value] = own[part.value] * self.share(microbatch)
        return seeds

    def local_seeds(self, own: Mapping[int, Tensor]) -> dict[tuple[int, int], Tensor]:
        """This rank's rows of output gradients that it has in full, by microbatch and Value."""
        row_dims = {part.value: part.row_dim for part in self._made}
        seeds = {}
        start = 0
        for microbatch, rows in enumerate(self._program.microbatches):
            lo, hi = self._program.rows[microbatch]
            for value, grad in own.items():
                row_dim = row_dims[value]
                if row_dim is not None:
                    seeds[microbatch, value] = take_rows(grad, row_dim, (start + lo, start + hi))
            start += rows
        return seeds
