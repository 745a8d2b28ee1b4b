"""Parts of the batch joined over ranks: rows one after another, sums and means of the global batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pyrannc.call.whole_batch import BatchRows
from pyrannc.core.graph import ValueFacts
from pyrannc.core.partition import RowDim
from pyrannc.job import process
from pyrannc.job.exchange import Group, Work, as_sent, dense, give_to_others, start_sum, sum_over_ranks
from pyrannc.runtime.rows import take_rows


class Joiner:
    """Joins parts of one global batch; all ranks call its methods together."""

    def __init__(self, rows: BatchRows, device: torch.device) -> None:
        self._rows = rows
        self._device = device

    def rows(self, tensor: Tensor, row_dim: RowDim, shape: Sequence[int]) -> Tensor:
        """All rows of what each rank has its own rows of."""
        if process.get_world_size() == 1:
            return tensor
        # Gathering needs equal numbers of rows, adding to zeros does not.
        as_bytes = tensor.dtype == torch.bool
        whole = torch.zeros(list(shape), dtype=torch.uint8 if as_bytes else tensor.dtype, device=self._device)
        take_rows(whole, row_dim, self._rows.own).copy_(tensor.detach())
        sum_over_ranks(torch.view_as_real(whole) if whole.is_complex() else whole)
        return whole.bool() if as_bytes else whole

    def of_first(self, tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Rank 0's tensor, of this ``shape``, or of that of this rank's tensor."""
        if process.get_world_size() == 1:
            return tensor
        first = process.get_rank() == 0
        size = list(tensor.shape if shape is None else shape)
        given = dense(tensor.detach()).clone() if first else None
        if given is None:
            given = torch.empty(size, dtype=tensor.dtype, device=self._device)
        give_to_others(torch.view_as_real(given) if given.is_complex() else given, 0)
        return given

    def summed(self, tensor: Tensor) -> Tensor:
        """A tensor of every rank, summed over the ranks where each has rows of its own."""
        if not self._rows.gathered or process.get_world_size() == 1:
            return tensor
        tensor = dense(tensor)
        sum_over_ranks(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        return tensor

    def reductions(
        self, totals: Mapping[int, ValueFacts], parts: Iterable[tuple[int, Tensor, float]]
    ) -> dict[int, Tensor]:
        """Reductions of the global batch.

        Args:
            totals: what to reduce, by Value.
            parts: made on this rank: Value, contents and weight.
        """
        started = Reductions(totals, parts, self._device)
        started.send(None)
        return started.finish()


class Reductions:
    """Reductions of the global batch on their way.

    Args:
        totals: what to reduce, by Value.
        parts: made on this rank: Value, contents and weight.
        device: this rank's.
    """

    def __init__(
        self, totals: Mapping[int, ValueFacts], parts: Iterable[tuple[int, Tensor, float]], device: torch.device
    ) -> None:
        self._types = {value: facts.dtype for value, facts in totals.items()}
        kinds = {value: _of_sums(dtype) for value, dtype in self._types.items()}
        self._sums = {
            value: torch.zeros(facts.shape_at(0), dtype=kinds[value], device=device) for value, facts in totals.items()
        }
        for value, tensor, weight in parts:
            self._sums[value].add_(tensor.detach().to(kinds[value]), alpha=weight)
        self._messages = [self._packed(dtype) for dtype in dict.fromkeys(kinds.values())]
        self._works: list[Work] = []

    def _packed(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in self._sums.values() if tensor.dtype == dtype])

    def send(self, group: Group | None) -> None:
        """Starts to sum over the ranks of a group, or of all: one message for each type. All ranks call it."""
        if process.get_world_size() > 1:
            members = process.world() if group is None else group
            self._works = [start_sum(as_sent(message), members) for message in self._messages]

    def finish(self) -> dict[int, Tensor]:
        """What was reduced, by Value, once it is there (on a GPU: for what comes later on the stream)."""
        for work in self._works:
            work.wait()
        for message in self._messages:
            tensors = [tensor for tensor in self._sums.values() if tensor.dtype == message.dtype]
            for tensor, part in zip(tensors, torch.split(message, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        return {
            value: (total if _is_exact(self._types[value]) else total.round()).to(self._types[value])
            for value, total in self._sums.items()
        }


def _of_sums(dtype: torch.dtype) -> torch.dtype:
    """The type in which parts are added up."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    # Integers are added, and averaged where all parts are the same, without loss up to 2**53.
    return dtype if _is_exact(dtype) else torch.float64


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
