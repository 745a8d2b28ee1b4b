"""Parts of several flat tensors come to all ranks at once, whatever their types and shares are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyrannc.job import process
from pyrannc.job.exchange import gather_each
from tests.ranks import RankPool

SHARES: list[tuple[torch.dtype, tuple[int, ...]]] = [
    (torch.float32, (3, 3, 3)),
    (torch.float64, (2, 2, 2)),
    (torch.float32, (1, 0, 4)),
    (torch.complex64, (2, 2, 2)),
    (torch.bfloat16, (5, 5, 5)),
    (torch.float32, (0, 0, 0)),
    (torch.float32, (4, 4, 4)),
]
ROOM = 2
"""Elements behind the parts, which are nobody's."""


def _flat(number: int, dtype: torch.dtype, parts: Sequence[int], own: int | None) -> Tensor:
    """The numbers of all ranks, or those of one and -1 elsewhere."""
    flat = torch.full((sum(parts) + ROOM,), -1, dtype=dtype)
    for rank, piece in enumerate(flat[: sum(parts)].split(list(parts))):
        if own in (None, rank):
            piece.copy_(100 * number + 10 * rank + torch.arange(len(piece)))
    return flat


def gathered() -> list[Tensor]:
    """What is in each tensor when all parts have come."""
    process.ensure_process_group()
    flats = [(_flat(number, *item, process.get_rank()), item[1]) for number, item in enumerate(SHARES)]
    for work in gather_each(flats, (0, 1, 2), None):
        work.wait()
    return [flat for flat, _ in flats]


def test_parts_come_to_all_ranks(ranks: Callable[[int], RankPool]) -> None:
    right = [_flat(number, *item, None) for number, item in enumerate(SHARES)]
    for found in ranks(3).run(gathered):
        for flat, expected in zip(found, right, strict=True):
            assert torch.equal(flat, expected)
