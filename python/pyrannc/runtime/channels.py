"""Messages between two ranks that follow each other in order.

A channel goes one way between two ranks and delivers in the order of sending; the static checker has
proven that both ends agree on that order. On NCCL every channel has a communicator of its own, so
that a message that waits for its peer holds up nothing else: all ranks have two groups, one for
messages to higher ranks and one for those to lower ones, in which torch connects each pair of ranks
by itself when one first sends to the other. Gloo matches messages by sender and order already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyrannc.job import process
from pyrannc.job.exchange import Work, as_sent, between_pairs


@dataclass(frozen=True)
class _UnderWay:
    """A message, and what it is made of: that lives until it has gone."""

    microbatch: int
    parts: list[tuple[Work, Tensor]]

    def wait(self) -> None:
        for work, _ in self.parts:
            work.wait()


class Channels:
    """All channels of this rank.

    Args:
        device: where the tensors are.

    Attributes:
        closed: the deployment has ended.
        by_hosts: no message takes a kernel that waits for its peer.
    """

    by_hosts = False

    def __init__(self, device: torch.device) -> None:
        self._rank = dist.get_rank()
        self._device = device
        self._opened: set[tuple[int, int]] = set()
        self._groups: dict[bool, dist.ProcessGroup] = {}
        self._sends: dict[int, deque[_UnderWay]] = {}
        self.closed = False

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Makes the channels that are not there yet. All ranks call it.

        Args:
            pairs: (source, destination) of every channel of the job that is needed, sorted.
        """
        new = [pair for pair in pairs if pair not in self._opened]
        self._opened.update(new)
        on_gpu = self._device.type == "cuda"
        if new and not self._groups:
            self._groups = {upwards: between_pairs() if on_gpu else process.world() for upwards in (True, False)}
        if on_gpu:
            self._connect([pair for pair in new if self._rank in pair])

    def _connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Sends one number over channels: NCCL connects at first use, which must not be inside a step."""
        number = torch.zeros(1, device=self._device)
        for source, destination in pairs:
            if source == self._rank:
                self.send(destination, [number], microbatch=0, window=None)
            else:
                self.receive(source, number).wait()
        self.finish()
        torch.cuda.synchronize(self._device)

    def send(self, peer: int, tensors: Sequence[Tensor], *, microbatch: int, window: int | None) -> None:
        """Starts to send a message of contiguous tensors and keeps them alive until they have gone.

        Args:
            window: how many messages may be under way before this waits for the oldest, to bound memory; ``None``: any.
        """
        under_way = self._sends.setdefault(peer, deque())
        while window is not None and len(under_way) >= window:
            under_way.popleft().wait()
        under_way.append(_UnderWay(microbatch, [self._start(peer, tensor) for tensor in tensors]))

    def let_go(self, peer: int, microbatch: int) -> None:
        """What has been sent to a peer up to this microbatch, whose answer has come, is not kept any longer."""
        under_way = self._sends.get(peer)
        while under_way and under_way[0].microbatch <= microbatch:
            under_way.popleft().wait()

    def _start(self, peer: int, tensor: Tensor) -> tuple[Work, Tensor]:
        work = dist.isend(as_sent(tensor), peer, group=self._groups[peer > self._rank])
        assert work is not None, "this rank is a member of its own channels"
        return work, tensor

    def receive(self, peer: int, into: Tensor) -> Work:
        """Starts to receive into a contiguous tensor."""
        work = dist.irecv(as_sent(into), peer, group=self._groups[peer < self._rank])
        assert work is not None, "this rank is a member of its own channels"
        return work

    def finish(self) -> None:
        """Waits for all sends (on a GPU: makes the stream wait)."""
        for under_way in self._sends.values():
            for message in under_way:
                message.wait()
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
