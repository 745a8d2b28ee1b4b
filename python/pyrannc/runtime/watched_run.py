"""The first run of a program, watched for what a CUDA graph cannot hold, and what is known of the program by then."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pyrannc.call.variant import Variant
from pyrannc.core.program import RankProgram
from pyrannc.runtime.batch import OfBatch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.cuda_graph import Recording, Seen, versions
from pyrannc.runtime.peaks import Growth
from pyrannc.runtime.run import OfOutputs, Run, Task
from pyrannc.runtime.timing import StepMarks
from pyrannc.runtime.waits import waits_noted
from pyrannc.store.gradient_set import GradientSet

_MOST_WAITING = 2
_MOST_FAILURES = 2
"""What fails once may have been in the way of something that is gone the next time."""


class Caller(Protocol):
    """Who a run is for."""

    @property
    def is_open(self) -> bool:
        """True while a backward of it may come."""


@dataclass
class Known:
    """What is known of a program.

    Attributes:
        codes: the compiled code that its Spans ran with: what was found of other code says nothing.
        is_new: no run of it has been met.
        watched: a run, to its end.
        watcher: who the last watched run is for, where its backward comes later.
        waited: so many runs waited for the device.
        why_not: why it is not recorded; empty if nothing speaks against it.
        seen: of its run.
        recordings: by room.
        recorded: how many times.
        failures: of recording, or of room for what replays give.
    """

    program: RankProgram
    context: StageContext
    codes: list[object]
    is_new: bool = True
    watched: bool = False
    watcher: weakref.ref[Caller] | None = None
    waited: int = 0
    why_not: str = ""
    seen: Seen = field(default_factory=Seen)
    recordings: dict[int, Recording] = field(default_factory=dict)
    recorded: int = 0
    failures: int = 0

    def note_failure(self, why: str) -> None:
        """What has kept it from being recorded, or replayed; that is tried no more, once it has failed twice."""
        self.failures += 1
        if self.failures == _MOST_FAILURES:
            self.why_not = why

    @property
    def is_under_watch(self) -> bool:
        """True while it is not known to what a watched run comes."""
        user = None if self.watcher is None else self.watcher()
        return user is not None and user.is_open


class WatchedRun(Run):
    """The run of a program before it is recorded.

    Args:
        end: is told of its end.
    """

    def __init__(
        self,
        known: Known,
        task: Task,
        inputs: OfBatch,
        inside: Mapping[int, Tensor],
        marks: StepMarks | None,
        room: GradientSet | None,
        end: Callable[[], None],
    ) -> None:
        super().__init__(task, marks)
        self._known, self._note_end = known, end
        self._waits = False
        self._seen = Seen()
        self._growth = Growth(task.context.device)
        with self._watching():
            self.forward(inputs, inside, room)
        self._versions = versions(task.context)
        if task.program.call == "whole":
            self._end()

    def backward(self, grads: OfOutputs, reached: Set[int], *, keep_graph: bool, reduce: bool) -> None:
        """Runs the backwards of a call with its criterion outside."""
        if versions(self._known.context) != self._versions:
            self._known.why_not = "parameters change between the call of the model and its backward"
        with self._watching():
            super().backward(grads, reached, keep_graph=keep_graph, reduce=reduce)
        self._seen.grads = {key: torch.empty_like(grad, device="meta") for key, grad in grads.items()}
        self._seen.reached = reached
        if not keep_graph and reduce:
            self._end()

    def _end(self) -> None:
        known = self._known
        known.seen = self._seen
        known.seen.growth_bytes = self._growth.most_bytes
        known.watched = not self._waits
        known.waited += self._waits
        if known.waited == _MOST_WAITING:
            known.why_not = "an operator waits for the device"
        self._note_end()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        randomness = self._known.context.randomness
        randomness.noted = self._seen.places
        try:
            with self._growth.measured(), waits_noted(self._known.context.device) as waits:
                yield
        finally:
            randomness.noted = None
        self._waits |= bool(waits)


def why_not(context: StageContext, variant: Variant, program: RankProgram) -> str:
    """What is known to stand against recording a program's run; empty if nothing is."""
    asked = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if "expandable_segments:true" in "".join(asked.lower().split()):
        return "the allocator has expandable segments, with which replayed messages of NCCL can hang"
    if variant.whole_part:
        return f"{variant.whole_part} stays whole, and may do anything"
    if program.call == "halves":
        if context.tail is not None and context.tail.params:
            return "parameters are used on all rows, after what is divided"
        facts = variant.whole.facts
        if sum(facts.values[value].requires_grad for value in set(facts.outputs)) > 1:
            return "the criterion is outside of the model, which gives several outputs"
    return ""
