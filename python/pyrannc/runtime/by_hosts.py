"""Messages between ranks by way of their hosts' memory, where a Stage's kernels are not known before it computes.

A message of NCCL is a kernel that runs until its peer comes to it, and CUDA may wait for all that runs on a device
before it loads a kernel that it has not launched yet. Which ones code launches that decides by what it computes, such
as a mixture by how many tokens come to an expert, no rehearsal can tell, and two ranks that load one while each waits
for the other's message wait for ever. Here no device waits for a peer while a Stage computes, but for what Replicas
gather and sum in parts, to which all of them come in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.job.exchange import Group, Work, as_sent
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.collectives import beside_all, close
from pyrannc.runtime.exchanges import Exchanges


class ByHosts:
    """Those of a deployment, once somebody needs them.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: tuple[Channels, Exchanges] | None = None

    def get(self) -> tuple[Channels, Exchanges]:
        """All ranks call it."""
        if self._made is None:
            self._made = ChannelsByHosts(self._device), ExchangesByHosts(self._device)
        return self._made

    def close(self) -> None:
        """Destroys the communicators."""
        for each in self._made or ():
            each.close()


class ChannelsByHosts(Channels):
    """Channels between all ranks, which all of them make together.

    Args:
        device: where the tensors are.
    """

    by_hosts = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        group = beside_all(torch.device("cpu"))
        self._groups = {True: group, False: group}

    def _start(self, peer: int, tensor: Tensor) -> tuple[Work, Tensor]:
        host = as_sent(tensor).cpu()
        return super()._start(peer, host)

    def receive(self, peer: int, into: Tensor) -> Work:
        """Starts to receive into a contiguous tensor."""
        host = _beside(into)
        return _Landing(super().receive(peer, host), host, into)

    def close(self) -> None:
        """Destroys the communicator."""
        self.closed = True
        close(self._groups.pop(True, None))
        self._groups.clear()


class ExchangesByHosts(Exchanges):
    """Exchanges of all ranks, which all of them make together.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._group: Group | None = beside_all(torch.device("cpu"))

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Work]:
        """Starts to send and receive contiguous tensors at once; who calls it keeps them."""
        leaving = [(peer, as_sent(tensor).cpu()) for peer, tensor in sends]
        coming = [(peer, _beside(tensor)) for peer, tensor in receives]
        works = super().start(leaving, coming)
        places = [(host, into) for (_, host), (_, into) in zip(coming, receives, strict=True)]
        kept = [(host, None) for _, host in leaving]
        return [_Landing(work, host, into) for work, (host, into) in zip(works, [*places, *kept], strict=True)]


class _Landing(Work):
    """What is under way between hosts, and where it goes from there."""

    def __init__(self, work: Work, host: Tensor, into: Tensor | None) -> None:
        super().__init__()
        self._work, self._host, self._into = work, host, into

    def wait(self, timeout: object = None) -> bool:
        """Waits for it, on the host."""
        del timeout
        self._work.wait()
        if self._into is not None:
            as_sent(self._into).copy_(self._host)
            self._into = None
        return True


def _beside(tensor: Tensor) -> Tensor:
    """Room for what it is sent as, on the host."""
    return torch.empty_like(as_sent(tensor), device="cpu")
