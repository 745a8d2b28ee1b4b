"""When one rank ends, all do: the watchdog of this process, and the collective calls that it is told of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, TypeVar, cast

import torch.distributed as dist

from pyrannc import config as configuration
from pyrannc._native import Watchdog
from pyrannc.config import Config
from pyrannc.errors import PeerError, RaNNCError
from pyrannc.job import process

_Method = TypeVar("_Method", bound=Callable[..., Any])

_EXPLAIN_WITHIN_S = 3.0
"""How long a collective that has failed waits to hear whether another rank is the cause."""

_SIGNS_OF_THE_BACK_END = ("gloo", "nccl", "connection", "broken pipe", "socket", "timed out")
"""Gloo raises plain RuntimeErrors, which only their texts tell from others."""

_NOT_OF_PYTHON = "Dummy-"
"""How the names of threads begin that others than Python have started."""

_OUTSIDE = "RaNNC's exchange between all ranks"
"""What an exchange outside of any collective call is called."""

_watchdog: Watchdog | None = None
_joined: process.Process | None = None
"""For which it was made."""
_inside = (0, "")
"""The thread of the last collective call, and what it called."""


def watchdog() -> Watchdog | None:
    """This process's watchdog, connected with those of the other ranks; ``None`` in a job of one rank.

    The first call is collective over all ranks, and so is the first one after they have joined anew.

    Raises:
        ConfigError: the configuration cannot be read.
        PeerError: another rank cannot be reached.
    """
    global _watchdog, _joined
    joined = process.ensure_process_group()
    if _watchdog is not None and _joined is not joined:
        leave()
    if _watchdog is None and joined.world_size > 1:
        config = configuration.load().config
        made = _listen(joined, config) if joined.rank == 0 else _connect(joined, config)
        ends: list[str] = _told(joined, made.open_exchange())
        made.join_exchange(ends, connect_timeout_s=config.connect_timeout_s)
        _watchdog, _joined = made, joined
        _report_uncaught(_watchdog)
        # Unlike atexit, this also runs at the end of a process started by multiprocessing.
        Finalize(None, leave, exitpriority=100)
    return _watchdog


def _listen(joined: process.Process, config: Config) -> Watchdog:
    made = Watchdog.listen(
        joined.world_size,
        joined.host,
        heartbeat_s=config.heartbeat_s,
        silence_timeout_s=config.silence_timeout_s,
        stall_timeout_s=config.stall_timeout_s,
        left_timeout_s=config.left_timeout_s,
        different_calls_timeout_s=config.different_calls_timeout_s,
        late_notice_s=config.late_notice_s,
        fail_grace_s=config.fail_grace_s,
    )
    _told(joined, made.address)
    return made


def _connect(joined: process.Process, config: Config) -> Watchdog:
    return Watchdog.connect(
        _told(joined, "")[0],
        joined.rank,
        joined.world_size,
        connect_timeout_s=config.connect_timeout_s,
        heartbeat_s=config.heartbeat_s,
        silence_timeout_s=config.silence_timeout_s,
        left_timeout_s=config.left_timeout_s,
        fail_grace_s=config.fail_grace_s,
    )


def _told(joined: process.Process, text: str) -> list[str]:
    """Every rank's text, in rank order, before the ranks' own connections stand."""
    everyone = [""] * joined.world_size
    dist.all_gather_object(everyone, text, group=joined.control)
    return everyone


def gather(purpose: int, text: bytes) -> list[bytes]:
    """Every rank's text, in rank order. All ranks call it, in the same collective call and for the same purpose.

    Args:
        purpose: up to 255.
        text: of any length.

    Raises:
        PeerError: another rank has died, failed, left or stalled, or is in another call.
    """
    with collective(_OUTSIDE):
        own = watchdog()
        return [text] if own is None else own.gather(purpose, text)


def leave() -> None:
    """Tells the other ranks that this one has come to its end as it should."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.close()
        _watchdog = None


class collective:
    """A collective call of the public API: the other ranks' watchdogs are told that this rank is inside.

    Calls inside of another one do not count. An error of the back-end that a lost rank has caused comes out as a
    PeerError.

    Args:
        name: the call as a script writes it, such as ``state_dict()``.
        new_round: the call begins only when all ranks have come.

    Raises:
        PeerError: another rank has died, failed, left or stalled; the back-end's error is the cause.
        RaNNCError: another thread of the script is inside of one.
    """

    __slots__ = ("_counts", "_name", "_new_round", "_watchdog")

    def __init__(self, name: str, *, new_round: bool = False) -> None:
        self._name = name
        self._new_round = new_round
        self._watchdog: Watchdog | None = None
        self._counts = False

    def __enter__(self) -> None:
        global _inside
        self._watchdog = _watchdog if _watchdog is not None else _joined_for(self._name)
        if self._watchdog is None:
            return
        self._counts = self._watchdog.begin(self._name, new_round=self._new_round)
        thread = threading.get_ident()
        if self._counts:
            _inside = thread, self._name
        elif _inside[0] != thread:
            _refuse_beside(self._name, thread, *_inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watchdog is None or not self._counts:
            return
        cause = None
        try:
            if error is not None and _comes_from_the_back_end(error):
                cause = self._watchdog.explain(_EXPLAIN_WITHIN_S)
        finally:
            self._watchdog.end(failed=error is not None)
        if cause is not None:
            raise PeerError(cause) from error


def _refuse_beside(call: str, thread: int, other_thread: int, other_call: str) -> None:
    """Raises where two threads of the script are in calls: not those on which torch differentiates for one of them."""
    threads = {each.ident: each.name for each in threading.enumerate()}
    of_script = {ident: name for ident, name in threads.items() if not name.startswith(_NOT_OF_PYTHON)}
    if thread in of_script and other_thread in of_script:
        raise RaNNCError(
            f'{call} was called on thread "{of_script[thread]}" while thread "{of_script[other_thread]}" is in '
            f"{other_call}: all ranks make these calls in the same order, which threads beside each other do not. "
            "Make all of them on one thread, or wait for a thread's call before the next one (thread.join()); what "
            "state_dict() has returned may be saved by another thread"
        )


def announced(call: str) -> Callable[[_Method], _Method]:
    """Makes a method of a module a collective call as soon as the module is ``ready``.

    Args:
        call: as a script writes it; ``{}`` stands for the first argument.
    """

    def decorate(method: _Method) -> _Method:
        @wraps(method)
        def announced_method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self.ready:
                return method(self, *args, **kwargs)
            with collective(call.format(*args, *kwargs.values(), "...") if "{}" in call else call):
                return method(self, *args, **kwargs)

        return cast(_Method, announced_method)

    return decorate


def _comes_from_the_back_end(error: BaseException) -> bool:
    if isinstance(error, ConnectionError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, RaNNCError):
        return False
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in _SIGNS_OF_THE_BACK_END)


def phase(name: str, *, busy: bool = False) -> None:
    """A phase of the first call begins, for messages; it ends with the next phase, Action or end of a call.

    Args:
        busy: this rank computes by itself, for as long as it takes: that is no stall.
    """
    if _watchdog is not None:
        _watchdog.phase(name, busy=busy)


def advance() -> None:
    """This rank comes forward inside of a long call or phase: it does not stall."""
    if _watchdog is not None:
        _watchdog.advance()


def _joined_for(call: str) -> Watchdog | None:
    """The watchdog, made now if need be; says so when the other ranks are long in coming."""
    if process.get_world_size() == 1:
        return watchdog()
    notice_s = configuration.load().config.late_notice_s

    def say() -> None:
        text = f"rank {process.get_rank()} waits in {call} for other ranks' first call of RaNNC for {notice_s:g} s"
        print(f"RaNNC: {text}. It must be called by all ranks", file=sys.stderr, flush=True)

    timer = threading.Timer(notice_s, say)
    timer.daemon = True
    timer.start()
    try:
        return watchdog()
    finally:
        timer.cancel()


def _report_uncaught(reporter: Watchdog) -> None:
    """Tells the other ranks of an exception that ends this one."""
    inner: Callable[[type[BaseException], BaseException, TracebackType | None], object] = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        inner(kind, error, traceback)
        sys.stderr.flush()
        text = str(error)
        reporter.fail(f"{kind.__name__}: {text}" if text else kind.__name__)

    sys.excepthook = report
