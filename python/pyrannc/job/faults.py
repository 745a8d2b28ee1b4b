"""When one rank ends, all do: the watchdog of this process."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize
from types import TracebackType

from pyrannc._native import Watchdog
from pyrannc.job import agree, process

_watchdog: Watchdog | None = None


def watchdog() -> Watchdog | None:
    """This process's watchdog, connected with those of the other ranks; ``None`` in a job of one rank.

    The first call is collective over all ranks.
    """
    global _watchdog
    joined = process.ensure_process_group()
    if _watchdog is None and joined.world_size > 1:
        if joined.rank == 0:
            _watchdog = Watchdog.listen(joined.world_size, joined.host)
            agree.broadcast_object(_watchdog.address)
        else:
            _watchdog = Watchdog.connect(agree.broadcast_object(None), joined.rank, joined.world_size)
        _report_uncaught(_watchdog)
        # Unlike atexit, this also runs at the end of a process started by multiprocessing.
        Finalize(None, leave, exitpriority=100)
    return _watchdog


def leave() -> None:
    """Tells the other ranks that this one has come to its end as it should."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None


def _report_uncaught(reporter: Watchdog) -> None:
    """Tells the other ranks of an exception that ends this one."""
    inner = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        inner(kind, error, traceback)
        sys.stderr.flush()
        reporter.fail(f"{kind.__name__}: {error}")

    sys.excepthook = report
