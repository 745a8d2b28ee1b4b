"""The end of a process beside torch's Gloo workers.

A Gloo group reports a collective as done before the worker thread that ran it lets go of the tensors, for which the
thread takes the interpreter. One that comes for it while the interpreter ends brings the process down with SIGABRT,
after a run that went well (github.com/pytorch/pytorch/issues/190489).
"""

import atexit
import time
from functools import cache
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
"""What torch calls the threads."""

_TOLD = ("State:", "voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")

_PAUSE_S = 0.002
_PATIENCE_S = 2.0


@cache
def await_at_exit() -> None:
    """See to it that the interpreter does not end before the Gloo workers have come to rest."""
    atexit.register(await_rest)


def await_rest() -> None:
    """Wait, without holding the interpreter, until no Gloo worker of this process does anything.

    Gives up after 2 s, so that a worker that hangs does not hold up the end; does not wait where the system tells
    nothing of threads.
    """
    end_s = time.monotonic() + _PATIENCE_S
    before, now = None, _look()
    while now != before or any(look[0].startswith("State:\tR") for look in now):
        if time.monotonic() > end_s:
            return
        time.sleep(_PAUSE_S)
        before, now = now, _look()


def _look() -> list[list[str]]:
    """For each worker its state, and how often it has been scheduled: one that waits for the interpreter sleeps, too,
    but gets on in every pause."""
    looks = [_status(thread) for thread in sorted(_THREADS.glob("*"))]
    return [[line for line in look if line.startswith(_TOLD)] for look in looks if look]


def _status(thread: Path) -> list[str]:
    """What the system tells of a worker; nothing of another thread, or of one that has ended."""
    try:
        lines = (thread / "status").read_text().splitlines()
    except OSError:
        return []
    return lines if lines[0] == f"Name:\t{_NAME}" else []
