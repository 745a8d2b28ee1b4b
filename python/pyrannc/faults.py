"""When one rank ends, all do: the watchdog of this process."""

from __future__ import annotations

import atexit
import sys
from types import TracebackType

from pyrannc import process
from pyrannc._native import Watchdog
from pyrannc.runtime import agree

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
        atexit.register(_watchdog.close)
    return _watchdog


def _report_uncaught(reporter: Watchdog) -> None:
    """Tells the other ranks of an exception that ends this one."""
    inner = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        inner(kind, error, traceback)
        sys.stderr.flush()
        reporter.fail(f"{kind.__name__}: {error}")

    sys.excepthook = report
