"""What each rank's and microbatch's part counts in losses, and so in gradients.

Parts of a sum over rows count in full, those of any other output without rows by their share ``rows / all rows``. The
gradients that the backwards start with carry the same weights, so that gradients are summed over microbatches and
ranks, never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import OutputPart
from pyrannc.core.program import RankProgram
from pyrannc.core.tail import Join
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.runtime.join import Reductions
from pyrannc.runtime.rows import take_rows


class Weights:
    """The weights of one call.

    Args:
        facts: the body's Graph.
        program: what the rank does.
        made: the outputs that some Stage makes, each once.
        joins: by output, how parts join.
        device: this rank's.
        loss: the output from which backwards start inside of the call, if there is one.
    """

    def __init__(
        self,
        facts: GraphFacts,
        program: RankProgram,
        made: Sequence[OutputPart],
        joins: Mapping[int, Join | None],
        device: torch.device,
        loss: int | None,
    ) -> None:
        self._facts = facts
        self._program = program
        self._made = made
        self._joins = joins
        self._device = device
        self._loss = loss

    def share(self, microbatch: int) -> float:
        """This rank's rows of the microbatch, as a share of the global batch."""
        lo, hi = self._program.rows[microbatch]
        return (hi - lo) / self._program.total_rows

    def _of_part(self, microbatch: int, value: int) -> float:
        return 1.0 if self._joins.get(value) == "sum" else self.share(microbatch)

    def totals(self, outputs: Mapping[tuple[int, int], Tensor]) -> Reductions:
        """Outputs without rows, of the global batch: to be sent.

        Args:
            outputs: made on this rank, by microbatch and Value.
        """
        facts = {part.value: self._facts.values[part.value] for part in self._made if part.row_dim is None}
        parts = [
            (value, tensor, self._of_part(microbatch, value))
            for (microbatch, value), tensor in outputs.items()
            if value in facts
        ]
        return Reductions(facts, parts, self._device)

    # With the loss inside of the call

    def inside(self, microbatch: int, grad: Tensor | None, value: int) -> Tensor | None:
        """The gradient with which the backward of a microbatch starts.

        Args:
            grad: of the whole output, which the loss itself needs none for.
        """
        weight = self._of_part(microbatch, value)
        if value == self._loss:
            return torch.full((), weight, dtype=self._facts.values[value].dtype, device=self._device)
        return None if grad is None else _weighted(grad, weight)

    # With the loss outside

    def own_gradients(
        self, grads: Sequence[Tensor | None], shapes: Sequence[tuple[torch.Size, torch.dtype]], wanted: Set[int]
    ) -> dict[int, Tensor]:
        """The gradients that came back for this rank's outputs, weighted, by Value.

        Args:
            grads: of the outputs; ``None`` for those that nothing was computed from here.
            shapes: shape and type of the outputs.
            wanted: the outputs that gradients come from on some rank.
        """
        own = {}
        for part, grad, (shape, dtype) in zip(self._made, grads, shapes, strict=True):
            if grad is not None:
                own[part.value] = grad * self.of_local_batch
            elif part.value in wanted and self._facts.values[part.value].requires_grad:
                own[part.value] = torch.zeros(shape, dtype=dtype, device=self._device)
        return own

    @property
    def of_local_batch(self) -> float:
        """Ranks average their losses by their rows; where every rank has all rows, they have the same loss."""
        if not self._program.gather_inputs:
            return 1.0
        rows = sum(part.local[1] - part.local[0] for part in self._program.slices)
        return rows / self._program.total_rows

    def seeds_of_totals(self, own: Mapping[int, Tensor]) -> dict[tuple[int, int], Tensor]:
        """The gradients of outputs without rows, by microbatch and Value. All ranks call it."""
        seeds = {}
        for part in self._made:
            if part.value in own and part.row_dim is None:
                if self._program.gather_inputs and process.get_world_size() > 1:
                    sum_over_ranks(own[part.value])
                for microbatch in range(len(self._program.rows)):
                    seeds[microbatch, part.value] = _weighted(own[part.value], self._of_part(microbatch, part.value))
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


def _weighted(grad: Tensor, weight: float) -> Tensor:
    return grad if weight == 1 else grad * weight


def scale_of(grads: Mapping[int, Tensor | None], loss: int, facts: GraphFacts) -> Tensor:
    """The gradient of a loss inside the call, which all gradients have yet to be multiplied by.

    Args:
        grads: of the outputs, as they came back, by Value.
        loss: the loss.
        facts: the whole Graph.

    Raises:
        RaNNCError: a gradient came back for another output.
    """
    for value, grad in grads.items():
        if grad is not None and value != loss:
            raise RaNNCError(
                f'a gradient came back for output "{facts.values[value].name}" besides the loss. The model returned '
                "one scalar loss, so its backward ran inside the call. Compute everything "
                "that you differentiate inside the model, or return no scalar from it"
            )
    grad = grads[loss]
    assert grad is not None, "only the loss can have started this backward"
    return grad
