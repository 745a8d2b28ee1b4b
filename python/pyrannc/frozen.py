"""Objects that are frozen: Python does not look at them when it looks for garbage, and does not list them."""

from __future__ import annotations

import gc
from typing import Any

_MANY = 10_000
"""More than Python itself freezes."""


def many_are_frozen() -> bool:
    """True where code has frozen what was there (``gc.freeze()``)."""
    return gc.get_freeze_count() > _MANY


def all_objects() -> list[Any]:
    """What Python lists, with what is frozen."""
    were_frozen = many_are_frozen()
    if were_frozen:
        gc.unfreeze()
    found = gc.get_objects()
    if were_frozen:
        gc.freeze()
    return found
