"""Scripts that ask RaNNC for the number of ranks, which a forward must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_told: list[Callable[[int], None]] = []


def asked(count: int) -> int:
    """The number of ranks, for a script that asks for it; who wants to know of that is told first."""
    for tell in _told:
        tell(count)
    return count


@contextmanager
def told_of_counts(tell: Callable[[int], None]) -> Iterator[None]:
    """While active, ``tell`` is given the number whenever a script asks for it; what it raises, the script gets."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)
