"""The phases of the first call: the other ranks hear of each when it begins, the log when it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyrannc.job import faults
from pyrannc.log import get_logger

_notes: list[str] = []


@contextmanager
def phase(component: str, name: str, announced: str, *, busy: bool = False) -> Iterator[None]:
    """Rank 0 logs one line at the end: the name, the time, and what :func:`note` was told meanwhile.

    Args:
        component: whose logger.
        name: in the log.
        announced: what messages to other ranks call it.
        busy: this rank computes by itself, for as long as it takes: that is no stall.
    """
    _notes.clear()
    faults.phase(announced, busy=busy)
    start_s = time.monotonic()
    yield
    notes = f" ({'; '.join(_notes)})" if _notes else ""
    get_logger(component).info("%s: %.2f s%s", name, time.monotonic() - start_s, notes)


def note(text: str) -> None:
    """Something of the phase under way that belongs into its line, such as what came from a file."""
    _notes.append(text)
