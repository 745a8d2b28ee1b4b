"""Rows of a batch on their way between the ranks' own batches and the Stages.

Whatever goes from one rank to another for one Value and one batch travels as one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pyrannc.core.partition import RowDim
from pyrannc.core.program import Rows, Slice, Transfer
from pyrannc.job.exchange import exchange

Shape: TypeAlias = tuple[list[int], torch.dtype]


def take_rows(tensor: Tensor, row_dim: RowDim, rows: Rows) -> Tensor:
    """A view of rows ``lo..hi`` of a tensor."""
    lo, hi = rows
    start, length = lo * row_dim.per_row, (hi - lo) * row_dim.per_row
    if start == 0 and length == tensor.size(row_dim.dim):
        return tensor
    return tensor.narrow(row_dim.dim, start, length)


def join_rows(pieces: Iterable[tuple[Rows, Tensor]], row_dim: RowDim) -> Tensor:
    """Pieces of one tensor, put together in the order of their rows; a single piece is returned as it is."""
    ordered = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered, row_dim.dim)


def local_rows(slices: Sequence[Slice], transfer: Transfer) -> Rows:
    """Where the rows of a transfer stand in the local batch that ``slices`` divide."""
    for part in slices:
        if part.microbatch == transfer.microbatch:
            shift = part.local[0] - part.at
            return transfer.rows[0] + shift, transfer.rows[1] + shift
    raise AssertionError(f"no slice for {transfer}")


def move_rows(
    transfers: Sequence[Transfer],
    rank: int,
    take: Callable[[Transfer], Tensor],
    shape: Callable[[Transfer], Shape],
    device: torch.device,
    *,
    reverse: bool = False,
) -> list[tuple[Transfer, Tensor]]:
    """Carries out transfers (from destination to source if ``reverse``).

    Args:
        transfers: those that concern this rank, in the order common to all ranks.
        rank: this rank.
        take: the tensor that this rank gives for a transfer.
        shape: shape and type of what a transfer brings.
        device: where to put what comes from other ranks.

    Returns:
        For each transfer to this rank, what it brought. What stays on this rank is not copied.
    """
    outgoing: dict[tuple[int, int], list[Transfer]] = {}
    incoming: dict[tuple[int, int], list[Transfer]] = {}
    arrived = []
    for transfer in transfers:
        source, destination = (transfer.dst, transfer.src) if reverse else (transfer.src, transfer.dst)
        if source == destination:
            arrived.append((transfer, take(transfer)))
        elif source == rank:
            outgoing.setdefault((destination, transfer.value), []).append(transfer)
        else:
            incoming.setdefault((source, transfer.value), []).append(transfer)
    sends = [(peer, _packed([take(transfer) for transfer in items])) for (peer, _), items in outgoing.items()]
    receives = []
    for (peer, _), items in incoming.items():
        shapes = [shape(transfer) for transfer in items]
        sizes = [torch.Size(extents).numel() for extents, _ in shapes]
        buffer = torch.empty(sum(sizes), dtype=shapes[0][1], device=device)
        receives.append((peer, buffer))
        parts = torch.split(buffer, sizes)
        arrived += [(item, part.view(extents)) for item, part, (extents, _) in zip(items, parts, shapes, strict=True)]
    exchange(sends, receives)
    return arrived


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).contiguous()
