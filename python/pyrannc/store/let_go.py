"""Gradients that a script lets go of by itself, as by ``param.grad = None``: all ranks must, or none."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Protocol
from weakref import WeakSet

from pyrannc.store.course import backwards


class Own(Protocol):
    """What gives the parameters of this rank their gradients."""

    let_go: set[str]
    """Names of those whose gradients it has put into ``.grad``, and the script has taken out."""

    def look(self) -> None:
        """Finds gradients that are gone."""
        ...

    def without(self) -> set[str]:
        """Names of those that have had none."""
        ...

    def settle(self) -> None:
        """Ranks have compared what is gone."""
        ...

    def forget(self) -> None:
        """Gradients have been cleared in a way that ranks count."""
        ...


class LetGo:
    """What a script has let go of since ranks compared it.

    What is gone here shows when it is looked for; of what other ranks hold, the script's assignments are noted.

    Args:
        own: what gives this rank's parameters gradients, which may become another.
        others: names of the parameters that other ranks alone hold, by ``id``.
    """

    def __init__(self, own: Callable[[], Own], others: Mapping[int, str]) -> None:
        self._own = own
        self._others = others
        self._found: set[str] = set()
        self._away: set[int] = set()
        # At which number of backwards gradients went: what goes once more before the next one is nothing.
        self._cleared = backwards()
        self._went: dict[int, int] = {}
        _watching.add(self)

    def note(self, param: int, *, is_gone: bool) -> None:
        """The script assigns to the gradient of a parameter, by ``id``, that other ranks may hold."""
        if param not in self._others:
            return
        now = backwards()
        if is_gone and self._went.get(param, self._cleared) < now:
            self._away.add(param)
            self._went[param] = now
        elif not is_gone:
            # What stood there before the last backward has gone even so.
            if self._went.get(param) == now:
                self._away.discard(param)
            self._went[param] = now - 1

    def look(self) -> None:
        """Takes note of what is gone, before a step or a call."""
        self._own().look()
        self._found.update(self._others[param] for param in self._away)

    def number(self) -> int:
        """Stands for what is gone; 0 for nothing."""
        self.look()
        names = self._names()
        return zlib.crc32(repr(sorted(names)).encode()) if names else 0

    def told(self) -> tuple[frozenset[str], frozenset[str]]:
        """What is gone, by name, and what this rank holds and has given no gradient to."""
        return frozenset(self._names()), frozenset(self._own().without())

    def _names(self) -> set[str]:
        return self._found | self._own().let_go

    def settle(self) -> None:
        """All ranks have let go of the same."""
        self._own().settle()
        self._found.clear()
        self._away.clear()

    def forget(self) -> None:
        """Gradients have been cleared in a way that ranks count."""
        self._own().forget()
        self._away.clear()
        self._went.clear()
        self._cleared = backwards()


_watching: WeakSet[LetGo] = WeakSet()


def note_away(param: int, *, is_gone: bool) -> None:
    """The script assigns to the gradient of a parameter, by ``id``, that other ranks hold."""
    for each in _watching:
        each.note(param, is_gone=is_gone)


def look_everywhere() -> None:
    """An optimizer is about to step."""
    for each in _watching:
        each.look()


def forget_cleared() -> None:
    """Gradients have been cleared in a way that ranks count."""
    for each in _watching:
        each.forget()
