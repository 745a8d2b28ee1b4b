"""The end of what all ranks have made together, and none of them has any more.

Garbage is collected on each rank at a time of its own, in the middle of anything. A communicator that ended then might
wait for ranks that still use it, or break what they have under way; so it is only noted there, and ends when all
ranks are together again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

from pyrannc.capture.torch_internals.devices import before_groups_end
from pyrannc.job import agree

_numbers = count()
_dropped: dict[int, Callable[[], None]] = {}
"""Of what is gone on this rank, by its number, which is the same on all ranks: what ends it."""


def when_dropped(owner: object, end: Callable[[], None]) -> weakref.finalize[Any, Any]:
    """Has :func:`end_dropped` call ``end`` once ``owner`` is gone on all ranks, unless the default process group has
    ended before. All ranks call it in the same order.

    Args:
        end: called by all ranks; it does not hold ``owner``.
    """
    noted = weakref.finalize(owner, _dropped.__setitem__, next(_numbers), end)
    noted.atexit = False
    before_groups_end(_dropped.clear)
    return noted


def end_dropped() -> None:
    """Ends what is gone on all ranks. All ranks call it."""
    everywhere: list[set[int]] = agree.gather_objects(set(_dropped))
    for number in sorted(set.intersection(*everywhere)):
        _dropped.pop(number)()
