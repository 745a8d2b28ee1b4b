"""Messages between two ranks that follow each other in order.

A channel goes one way between two ranks and delivers in the order of sending; the static checker has
proven that both ends agree on that order. On NCCL every channel has a communicator of its own, so
that a message that waits for its peer holds up nothing else. Gloo matches messages by sender and
order already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyrannc.job import process
from pyrannc.job.exchange import Work, as_sent

_CTAS = 4
"""Blocks of threads that a message takes on a GPU. One that waits for its peer keeps them from computing."""


class Channels:
    """All channels of this rank.

    Args:
        device: where the tensors are.

    Attributes:
        closed: the deployment has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._rank = dist.get_rank()
        self._device = device
        self._opened: set[tuple[int, int]] = set()
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._sends: dict[int, deque[list[tuple[Work, Tensor]]]] = {}
        self.closed = False

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes the channels that are not there yet. All ranks call it.

        Args:
            pairs: (source, destination) of every channel of the job that is needed, sorted.
        """
        new = [pair for pair in pairs if pair not in self._opened]
        self._opened.update(new)
        on_gpu = self._device.type == "cuda"
        for pair in new:
            # torch tells groups apart by how many a rank has made, so all ranks make all of them.
            group = _nccl_group(pair) if on_gpu else process.world()
            if self._rank in pair:
                assert isinstance(group, dist.ProcessGroup), "both ends of the channel are in its group"
                self._groups[pair] = group
        if on_gpu:
            self._connect([pair for pair in new if self._rank in pair])

    def _connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Sends one number over channels: NCCL connects at first use, which must not be inside a step."""
        number = torch.zeros(1, device=self._device)
        for source, destination in pairs:
            if source == self._rank:
                self.send(destination, [number], window=None)
            else:
                self.receive(source, number).wait()
        self.finish()
        torch.cuda.synchronize(self._device)

    def send(self, peer: int, tensors: Sequence[Tensor], *, window: int | None) -> None:
        """Starts to send a message of contiguous tensors and keeps them alive until they have gone.

        Args:
            window: how many messages may be under way before this waits for the oldest, to bound memory; ``None``: any.
        """
        under_way = self._sends.setdefault(peer, deque())
        while window is not None and len(under_way) >= window:
            for work, _ in under_way.popleft():
                work.wait()
        under_way.append([(self._start(peer, tensor), tensor) for tensor in tensors])

    def _start(self, peer: int, tensor: Tensor) -> Work:
        work = dist.isend(as_sent(tensor), peer, group=self._groups[self._rank, peer])
        assert work is not None, "this rank is a member of its own channels"
        return work

    def receive(self, peer: int, into: Tensor) -> Work:
        """Starts to receive into a contiguous tensor."""
        work = dist.irecv(as_sent(into), peer, group=self._groups[peer, self._rank])
        assert work is not None, "this rank is a member of its own channels"
        return work

    def finish(self) -> None:
        """Waits for all sends (on a GPU: makes the stream wait)."""
        for under_way in self._sends.values():
            for message in under_way:
                for work, _ in message:
                    work.wait()
            under_way.clear()

    def forget_sends(self) -> None:
        """Waits for none of them."""
        self._sends.clear()

    def close(self) -> None:
        """Destroys the communicators."""
        self.closed = True
        for group in self._groups.values():
            if group is not process.world():
                dist.destroy_process_group(group)
        self._groups.clear()


def _nccl_group(pair: tuple[int, int]) -> dist.ProcessGroup | None:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _CTAS
    group: dist.ProcessGroup | None = dist.new_group(list(pair), backend="nccl", pg_options=options)
    return group
