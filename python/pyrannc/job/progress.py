"""How far long work is: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from pyrannc.job import faults
from pyrannc.log import get_logger

if TYPE_CHECKING:
    from rich.progress import Progress

_log = get_logger("DPStaging")

_LINE_EVERY_S = 5.0


class Lines:
    """Says now and then what some work is at, of which nobody knows how much there is.

    Args:
        component: whose logger.
        title: what is done.
    """

    def __init__(self, component: str, title: str) -> None:
        self._log = get_logger(component)
        self._title = title
        self._start = self._last_line = time.monotonic()

    def at(self, what: str) -> None:
        """What comes next; told often."""
        faults.advance()
        now = time.monotonic()
        if now - self._last_line > _LINE_EVERY_S:
            self._last_line = now
            self._log.info("%s: %.0f s so far, now at %s", self._title, now - self._start, what)


class Bar:
    """Shows how much of some work is done and how long the rest may take.

    Args:
        title: what is done.
        total: amount of work, in any unit.
        count: into how many parts it falls.
        shown: False on ranks that stay silent.
    """

    def __init__(self, title: str, total: float, count: int, *, shown: bool) -> None:
        self._title = title
        self._total = total
        self._count = count
        self._shown = shown
        self._done = 0.0
        self._parts = 0
        self._bar: Progress | None = None

    def __enter__(self) -> Bar:
        self._start = self._last_line = time.monotonic()
        if self._shown and sys.stderr.isatty():
            # Few starts draw a bar, and each would pay for the import.
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[parts]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.add_task(self._title, total=self._total, parts=self._parts_text())
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: float) -> None:
        """One more part is done, which was so much work."""
        self._done += amount
        self._parts += 1
        faults.advance()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=amount, parts=self._parts_text())
        elif self._shown and time.monotonic() - self._last_line > _LINE_EVERY_S:
            self._last_line = time.monotonic()
            passed_s = self._last_line - self._start
            left_s = passed_s * (self._total - self._done) / max(self._done, 1e-9)
            _log.info("%s: %s, about %.0f s left", self._title, self._parts_text(), left_s)

    def _parts_text(self) -> str:
        return f"{self._parts} of {self._count}"
