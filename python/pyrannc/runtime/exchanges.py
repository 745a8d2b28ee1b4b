"""Exchanges of rows between the ranks' own batches and the Stages, on one group of all ranks.

All ranks come to them in one order, which the static checker has proven: those of a communicator follow each other, and
each ends when all ranks that take part have come to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.core.program import Exchange, RankProgram
from pyrannc.job.exchange import CTAS_OF_MESSAGES, Group, Work, start_exchange
from pyrannc.runtime.collectives import beside_all, close


class Exchanges:
    """Those of a deployment.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Group | None = None
        self._opened: RankProgram | None = None
        self._connected: tuple[set[int], set[int]] = (set(), set())

    def open(self, program: RankProgram) -> None:
        """Makes the group that a program needs, and connects its ranks. All ranks call it."""
        if not program.exchanges or program is self._opened:
            return
        self._opened = program
        if self._group is None:
            self._group = beside_all(self._device, ctas=CTAS_OF_MESSAGES)
        if self._device.type == "cuda":
            self._connect(program)

    def _connect(self, program: RankProgram) -> None:
        """Sends a number to each new peer: NCCL connects two ranks at first use, which must not be inside a step."""
        found = [action for action in (*program.forward, *program.backward) if isinstance(action, Exchange)]
        to = {parcel.peer for exchange in found for parcel in exchange.sends} - self._connected[0]
        of = {parcel.peer for exchange in found for parcel in exchange.recvs} - self._connected[1]
        if not to and not of:
            return
        self._connected[0].update(to)
        self._connected[1].update(of)
        numbers = torch.zeros(len(to) + len(of), 1, device=self._device)
        sends = list(zip(sorted(to), numbers, strict=False))
        for work in self.start(sends, list(zip(sorted(of), numbers[len(to) :], strict=True))):
            work.wait()
        torch.cuda.synchronize(self._device)

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Work]:
        """Starts to send and receive contiguous tensors at once; who calls it keeps them."""
        assert self._group is not None, "it was opened"
        return start_exchange(sends, receives, self._group)

    def close(self) -> None:
        """Destroys the communicator."""
        close(self._group)
        self._group = None
