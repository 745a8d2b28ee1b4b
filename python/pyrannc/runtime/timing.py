"""When the computations of a rank's last training steps began and ended.

On a GPU a mark is an event on the compute stream: making it waits for nothing. Marks are read only when somebody asks,
and their events serve again in later steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import torch

from pyrannc.core.program import RankProgram

KEPT_STEPS = 10
"""Steps whose marks are kept."""

Kind = Literal["forward", "backward"]
Passed: TypeAlias = tuple[Kind, int, float, float]
"""A computation: its microbatch, and its start and end in microseconds from the start of a replay."""


@dataclass(frozen=True)
class Span:
    """A computation, in microseconds from the start of its step."""

    kind: Kind
    microbatch: int
    start_us: float
    end_us: float


@dataclass(frozen=True)
class StepTimes:
    """When what happened in one training step of one rank.

    Attributes:
        program: what the rank did.
        spans: forwards and backwards, in the order in which they ran.
        reduced_us: from the start until gradients were summed over ranks.
        step_us: from the start to the start of the next step; what the training loop does in between is included.
    """

    program: RankProgram
    spans: tuple[Span, ...]
    reduced_us: float
    step_us: float


class Timing:
    """Measures the training steps of one rank.

    Args:
        device: where the rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[StepMarks] = deque()
        self._last: StepMarks | None = None
        self._spare: list[_Event] = []

    def begin(self, program: RankProgram) -> StepMarks | None:
        """A call of the model starts. Returns where to mark what it does, or ``None`` if it does not train."""
        previous, self._last = self._last, None
        if program.call == "forward":
            return None
        # Backwards run on the stream of the call, too. Looking it up takes longer than marking it.
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        step = self._last = StepMarks(program, partial(self._mark, stream))
        if previous is not None and previous.reduced is not None:
            previous.end = step.start
        self._steps.append(step)
        if len(self._steps) > KEPT_STEPS + 1:
            self._spare.extend(self._steps.popleft().events())
        return step

    def times(self) -> list[StepTimes]:
        """The last steps that another one followed at once. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = [step.times() for step in self._steps]
        return [times for times in found if times is not None]

    def _mark(self, stream: torch.cuda.Stream | None) -> _Event:
        event = self._spare.pop() if self._spare else self._new_event()
        event.record(stream)
        return event

    def _new_event(self) -> _Event:
        if self._device.type != "cuda":
            return _HostEvent()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it


class Marks(Protocol):
    """Where a run notes what passes."""

    def span(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        """The computation runs inside."""

    def finish(self) -> None:
        """The gradients have been summed over ranks."""


class StepMarks:
    """The marks of one training step, of which the first is made at once.

    Attributes:
        reduced: gradients have been summed over ranks.
        end: the start of the next training step, if that followed at once.
    """

    def __init__(self, program: RankProgram, mark: Callable[[], _Event]) -> None:
        self._program = program
        self._mark = mark
        self._spans: list[tuple[Kind, int, _Event, _Event]] = []
        self._replayed: tuple[_Event, Callable[[], list[Passed]]] | None = None
        self.start = mark()
        self.reduced: _Event | None = None
        self.end: _Event | None = None

    @contextmanager
    def span(self, kind: Kind, microbatch: int) -> Iterator[None]:
        """The computation runs inside."""
        start = self._mark()
        yield
        self._spans.append((kind, microbatch, start, self._mark()))

    def replayed(self, passed: Callable[[], list[Passed]]) -> None:
        """A replay starts, in which ``passed`` tells what there was."""
        self._replayed = self._mark(), passed

    def finish(self) -> None:
        """The gradients have been summed over ranks."""
        self.reduced = self._mark()

    def events(self) -> list[_Event]:
        """All of the step's own; its end belongs to the next step."""
        events = [self.start, *(event for _, _, *pair in self._spans for event in pair)]
        own = [self.reduced, None if self._replayed is None else self._replayed[0]]
        return [*events, *(event for event in own if event is not None)]

    def times(self) -> StepTimes | None:
        """What the marks say; ``None`` where no other training step followed at once."""
        if self.reduced is None or self.end is None:
            return None
        spans = [
            Span(kind, microbatch, self._since_start_us(start), self._since_start_us(end))
            for kind, microbatch, start, end in self._spans
        ]
        if self._replayed is not None:
            begun, passed = self._replayed
            shift_us = self._since_start_us(begun)
            spans = [Span(kind, number, shift_us + start, shift_us + end) for kind, number, start, end in passed()]
        reduced_us, step_us = self._since_start_us(self.reduced), self._since_start_us(self.end)
        return StepTimes(self._program, tuple(spans), reduced_us, step_us)

    def _since_start_us(self, event: _Event) -> float:
        elapsed_ms: float = self.start.elapsed_time(event)
        return elapsed_ms * 1e3


class _HostEvent:
    """The part of ``torch.cuda.Event`` that is needed here, for computations on the host."""

    def __init__(self) -> None:
        self._s = 0.0

    def record(self, _: None) -> None:
        self._s = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        """Milliseconds until ``end``."""
        return (end._s - self._s) * 1e3


_Event = Any
"""A ``torch.cuda.Event`` or a ``_HostEvent``."""
