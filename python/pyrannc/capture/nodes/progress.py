"""What a capture is at, for those who wait for one that takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Listener:
    tell: Callable[[str], None]
    what: str = ""


_listeners: list[_Listener] = []


@contextmanager
def progress_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Captures inside of it tell what they are at, often."""
    _listeners.append(_Listener(tell))
    try:
        yield
    finally:
        _listeners.pop()


def is_at(what: str) -> None:
    """Something new begins."""
    if _listeners:
        _listeners[-1].what = what
        goes_on()


def goes_on() -> None:
    """More of the same is done."""
    if _listeners:
        _listeners[-1].tell(_listeners[-1].what)
