"""Iterators of Python itself that the user's code can reach, and whether something has been taken from them."""

from __future__ import annotations

import gc
import itertools
import operator
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FrameType, GeneratorType
from typing import Any

from pyrannc.errors import CaptureError

from .holders import Name
from .plain import same

_OF_PYTHON = ("builtins", "itertools", "collections", "_collections")
_KEEPING: tuple[type, ...] = (itertools.cycle, type(itertools.tee(())[0]))


def is_iterator(value: Any) -> bool:
    """True for generators, and what ``iter()``, ``zip()`` and ``itertools`` give; those of the user are objects."""
    return hasattr(type(value), "__next__") and type(value).__module__ in _OF_PYTHON


def behind(iterator: Any) -> list[Any]:
    """What an iterator goes on with: what it takes from; of a generator its variables."""
    held = gc.get_referents(iterator)
    if not isinstance(iterator, GeneratorType):
        # Such as zip() have several in a tuple.
        return [part for item in held for part in (item if type(item) is tuple else (item,))]
    frame = iterator.gi_frame
    if frame is None:
        return []
    # Asked for its variables, a frame would keep them. What is in none, as what a loop takes from, is there too.
    held += gc.get_referents(frame)
    others = {id(frame.f_globals), id(frame.f_builtins)}
    return [item for item in held if id(item) not in others and not isinstance(item, (CodeType, FrameType))]


class Taking:
    """An iterator before a call, which may take something from it.

    Args:
        iterator: which this leaves as it is.
        called: it.
    """

    def __init__(self, iterator: Any, called: Name) -> None:
        self._iterator, self._called = iterator, called
        # Kept, so that what is new cannot be taken for it.
        self._before = list(_state(iterator))

    def refuse_taken(self) -> None:
        """Raises CaptureError when something has been taken since."""
        now = list(_state(self._iterator))
        if len(now) != len(self._before) or not all(map(same, self._before, now)):
            raise CaptureError(
                f"the forward takes what comes next from an iterator, the {self._called}, from which a captured call "
                "takes nothing. Take it outside of the forward and pass it as an argument, or register a tensor as a "
                f'buffer (self.register_buffer("{self._called.last}", torch.tensor(...))) and change that in place'
            )


def _place(iterator: Any) -> Any:
    """How far one has come that takes again what it has kept, where Python tells."""
    if type(iterator) not in _KEEPING:
        return None
    with warnings.catch_warnings(), suppress(TypeError):
        # From some version on it can no longer be asked, and says so before.
        warnings.simplefilter("ignore", DeprecationWarning)
        made = iterator.__reduce__()
        return operator.length_hint(made[1][0], -1) if type(iterator) is itertools.cycle else made[2][1]
    return None


def _state(iterator: Any) -> Iterator[Any]:
    """What differs once something has been taken; of the iterators behind it, too."""
    waiting, seen = [iterator], list[Any]()
    while waiting:
        item = waiting.pop()
        if any(item is other for other in seen):
            continue
        seen.append(item)
        held = behind(item)
        yield from (operator.length_hint(item, -1), _place(item), *held)
        if isinstance(item, GeneratorType) and item.gi_frame is not None:
            yield item.gi_frame.f_lasti
        elif isinstance(item, itertools.count):
            yield repr(item)
        waiting += filter(is_iterator, held)
