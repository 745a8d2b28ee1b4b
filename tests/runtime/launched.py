"""A program for launchers: trains a case of the proof, and fails on one rank in the middle of a step if asked to.

python -m tests.runtime.launched [killed|raises]
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pyrannc
from pyrannc.runtime.seat import Seat

from .equivalence import Case, check

MICROBATCHES = 3
FAILING_RANK = 1
FAILING_STEP = 2
BEATS_S = 2.0


def case_for(world_size: int) -> Case:
    """As many Stages as ranks, with the loss outside."""
    return Case("chain", (3,) * world_size, stages=world_size, microbatches=MICROBATCHES, optimizer="sgd")


def fail(how: str) -> None:
    """Ends this rank."""
    if how == "killed":
        # Where a rank was that can say nothing any more is known from its last beat.
        time.sleep(BEATS_S)
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("boom")


def fail_in_backward(how: str) -> None:
    """Lets this rank fail in the backward of the second microbatch of a step."""
    backward: Callable[..., None] = Seat.backward
    steps: list[Any] = []

    def failing(seat: Seat, microbatch: int, *args: Any, **kwargs: Any) -> None:
        if seat not in steps:
            steps.append(seat)
        if len(steps) == FAILING_STEP and microbatch == 1:
            fail(how)
        backward(seat, microbatch, *args, **kwargs)

    Seat.backward = failing  # type: ignore[method-assign]  # on purpose


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how and pyrannc.get_rank() == FAILING_RANK:
        fail_in_backward(how)
    with tempfile.TemporaryDirectory() as folder:
        found = check(case_for(pyrannc.get_world_size()), folder)
    # One string: launchers mix what ranks write.
    sys.stdout.write(f"rank {pyrannc.get_rank()} of {pyrannc.get_world_size()}: {found or 'no differences'}\n")
    sys.stdout.flush()
    pyrannc.clear()


if __name__ == "__main__":
    main()
