"""When the computations of a recorded run began and ended, by the clock of its GPU, and at which one that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pyrannc.core.program import Action, RankProgram
from pyrannc.runtime.position import ActionRecord, replay_places
from pyrannc.runtime.replay_place import place_word, take_numbers
from pyrannc.runtime.timing import KEPT_STEPS, Kind, Passed

_NS = 1e-3


class Clock:
    """The times of the last replays of one recording, whose marks also tell the watchdog where the GPU is.

    Args:
        program: what is recorded.
        record: of its Actions.
        device: where it runs.

    Attributes:
        row: of the times of the last launch.
    """

    def __init__(self, program: RankProgram, record: ActionRecord, device: torch.device) -> None:
        # The kernel is compiled here, before anything is recorded.
        from pyrannc.runtime.clock_triton import mark

        self._mark = mark
        self._record = record
        self._title = record.title(program)
        # Each computation has a start and an end, and so has each list of Actions.
        places = 2 * (len(program.forward) + len(program.backward) + 2)
        self._times = torch.zeros(KEPT_STEPS + 2, places, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = place_word(record.watchdog, device)
        self._first = take_numbers(places)
        self._spans: list[tuple[Kind, int, int, int]] = []
        self._computed: list[int] = []
        self._names: list[str] = []
        self._marked = 0
        self.row = 0
        mark(self._times, self._row, 0, 0, self._word, 0)

    @contextmanager
    def graph(self, actions: Sequence[Action], first_record: int) -> Iterator[None]:
        """In the recording: these Actions are carried out inside.

        Args:
            first_record: place of the first one in the record.
        """
        self._computed.clear()
        self._next()
        yield
        # No place: the last one ends.
        self._mark(self._times, self._row, 0, self._marked, self._word, 0)
        self._marked += 1
        computed = [index - first_record for index in self._computed]
        self._names += [*replay_places(actions, computed, self._title), ""]

    def _next(self) -> int:
        place = self._marked
        # Each launch begins a row. Nobody has to tell the device which.
        self._mark(self._times, self._row, int(place == 0), place, self._word, self._first + place)
        self._marked += 1
        return place

    @contextmanager
    def span(self, kind: Kind, microbatch: int) -> Iterator[None]:
        """In the recording: the computation runs inside."""
        self._computed.append(self._record.index)
        start = self._next()
        yield
        self._spans.append((kind, microbatch, start, self._next()))

    def finish(self) -> None:
        """The end of the sums is marked on the stream, behind the replay."""

    def announce(self) -> None:
        """Replays may come: the watchdog learns the names of the places."""
        if self._record.watchdog is not None:
            self._record.watchdog.recorded(self._first, self._names)

    def retire(self) -> None:
        """None will come any more."""
        if self._record.watchdog is not None:
            self._record.watchdog.forgotten(self._first)

    @property
    def next_row(self) -> int:
        """Of the times of the next launch."""
        return (self.row + 1) % len(self._times)

    def count_launch(self) -> None:
        """What begins with the first of the marks has been launched."""
        self.row = self.next_row

    def take_back_launch(self) -> None:
        """The next launch takes the row of the last one."""
        self.row = (self.row - 1) % len(self._times)
        self._row.fill_(self.row)

    def read(self, row: int) -> list[Passed]:
        """What passed in a replay whose row no later one has taken. Waits for the device."""
        times = self._times[row].tolist()
        return [
            (kind, microbatch, (times[start] - times[0]) * _NS, (times[end] - times[0]) * _NS)
            for kind, microbatch, start, end in self._spans
        ]
