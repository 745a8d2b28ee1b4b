"""When the computations of a recorded run began and ended, by the clock of its GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyrannc.core.program import RankProgram
from pyrannc.runtime.timing import KEPT_STEPS, Kind, Passed

_NS = 1e-3


class Clock:
    """The times of the last replays of one recording.

    Args:
        program: what is recorded.
        device: where it runs.
    """

    def __init__(self, program: RankProgram, device: torch.device) -> None:
        # The kernel is compiled here, before anything is recorded.
        from pyrannc.runtime.clock_triton import mark

        self._mark = mark
        actions = len(program.forward) + len(program.backward)
        # The first is the start.
        self._times = torch.zeros(KEPT_STEPS + 2, 2 * actions + 1, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._spans: list[tuple[Kind, int, int, int]] = []
        self._marked = 0
        self._replays = 0
        mark(self._times, self._row, 0)

    def start(self) -> None:
        """In the recording: the run begins."""
        self._marked = 0
        self._next()

    def _next(self) -> int:
        place = self._marked
        self._mark(self._times, self._row, place)
        self._marked += 1
        return place

    @contextmanager
    def span(self, kind: Kind, microbatch: int) -> Iterator[None]:
        """In the recording: the computation runs inside."""
        start = self._next()
        yield
        self._spans.append((kind, microbatch, start, self._next()))

    def finish(self) -> None:
        """The end of the sums is marked on the stream, behind the replay."""

    def begin_replay(self) -> int:
        """Before a replay; gives the row of its times."""
        row = self._replays % len(self._times)
        self._replays += 1
        self._row.fill_(row)
        return row

    def read(self, row: int) -> list[Passed]:
        """What passed in a replay whose row no later one has taken. Waits for the device."""
        times = self._times[row].tolist()
        return [
            (kind, microbatch, (times[start] - times[0]) * _NS, (times[end] - times[0]) * _NS)
            for kind, microbatch, start, end in self._spans
        ]
