"""The process groups over which ranks that hold the same parameters sum gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pyrannc.job import process
from pyrannc.job.exchange import Group, on_nccl, sum_over_ranks


class Groups:
    """Process groups by their ranks, in whatever order; all ranks ask for new ones in the same order.

    Args:
        apart: also that of all ranks is a new one, whose messages wait for no others.
    """

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        self._made: dict[tuple[int, ...], Group | None] = {}

    def of(self, ranks: tuple[int, ...]) -> Group | None:
        """The process group of some ranks; ``None`` for a single one, which needs none."""
        if len(ranks) == process.get_world_size() and not self._apart:
            return process.world()
        members = tuple(sorted(ranks))
        if members not in self._made:
            self._made[members] = dist.new_group(list(members)) if len(members) > 1 else None
        return self._made[members]

    def close(self) -> None:
        """Destroys the communicators."""
        for group in self._made.values():
            close(group)


def beside_all(device: torch.device, *, ctas: int = 1) -> Group:
    """One more process group of all ranks, ready for messages while others are under way.

    Args:
        ctas: blocks of threads that its messages take on a GPU; one is enough for few numbers.
    """
    if device.type != "cuda":
        on_host: Group = dist.new_group(backend="gloo")
        return on_host
    made = on_nccl(ctas)
    # NCCL connects at first use, which must not be inside a step.
    sum_over_ranks(torch.zeros(1, device=device), made)
    torch.cuda.synchronize(device)
    return made


def close(group: Group | None) -> None:
    """Destroys a communicator, if it is one."""
    if group is not None:
        dist.destroy_process_group(group)
