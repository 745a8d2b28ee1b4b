"""The rows of all ranks on every rank, for what the model asks the whole batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrannc.core.program import Rows
from pyrannc.errors import MismatchError
from pyrannc.job import agree, process
from pyrannc.job.exchange import give_to_others, sum_over_ranks


@dataclass(frozen=True)
class BatchRows:
    """The rows of the global batch, and which of them are this rank's.

    Attributes:
        per_rank: rows of each rank's batch, as far as they count.
        gathered: the global batch is the ranks' rows, one rank's after another's; otherwise rank 0's alone, whose
            outputs every rank gets.
    """

    per_rank: tuple[int, ...]
    gathered: bool

    @property
    def total(self) -> int:
        """All rows."""
        return sum(self.per_rank)

    @property
    def own_count(self) -> int:
        """Rows that this rank brings."""
        return self.per_rank[process.get_rank()]

    @property
    def own_share(self) -> float:
        """Those as a share of all; over all ranks they make 1."""
        return self.own_count / self.total

    @property
    def own(self) -> Rows:
        """Rows whose outputs this rank gets."""
        if not self.gathered:
            return 0, self.total
        start = sum(self.per_rank[: process.get_rank()])
        return start, start + self.own_count

    @property
    def in_parts(self) -> bool:
        """True when some rank has not all rows."""
        return process.get_world_size() > 1

    def joined(self, tensors: Sequence[Tensor], per_row: Sequence[int], wanted: Collection[int]) -> list[Tensor]:
        """The arguments' tensors with all rows in those ``wanted``; the others stay. All ranks call it.

        Args:
            tensors: of this rank, on its device; but for the rows of the same shapes and types on all ranks.
            per_row: for each of them, how many elements of its dimension 0 each row has; 0: none.
            wanted: places of tensors.
        """
        found = list(tensors)
        for place in sorted(wanted) if self.in_parts else ():
            if per_row[place]:
                found[place] = self._join(tensors[place].detach(), per_row[place])
            elif not self.gathered:
                found[place] = _of_first(tensors[place].detach(), tensors[place].shape)
        return found

    def _join(self, tensor: Tensor, per_row: int) -> Tensor:
        shape = (self.total * per_row, *tensor.shape[1:])
        if not self.gathered:
            return _of_first(tensor, shape)
        # Bytes beside zeros add up without loss, whatever the type; ranks may have different numbers of rows.
        whole = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        lo, hi = self.own
        whole[lo * per_row : hi * per_row] = tensor
        if whole.numel():
            sum_over_ranks(_bytes_of(whole))
        return whole

    def refuse_other_shapes(self, tensors: Sequence[Tensor], per_row: Sequence[int]) -> None:
        """Raises MismatchError unless all ranks' tensors can be joined. All ranks call it."""
        own = [
            (str(tensor.dtype), count, tuple(tensor.shape[1:] if count else tensor.shape))
            for tensor, count in zip(tensors, per_row, strict=True)
        ]
        for rank, other in enumerate(agree.gather_objects(own)):
            if other != own:
                raise MismatchError(
                    f"the ranks call the model with arguments of different shapes or types (rank {process.get_rank()}: "
                    f"{own}, rank {rank}: {other}, by row); pad rows to a length that all ranks agree on"
                )


def _of_first(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    first = process.get_rank() == 0
    given = tensor.contiguous() if first else torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    give_to_others(_bytes_of(given), 0)
    return given


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
