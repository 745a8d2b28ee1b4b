"""Objects that weak references and proxies stand for."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from .containers import content
from .holdings import SCALARS, is_record
from .kinds import is_of
from .members import members

REFERENCES = (weakref.ref, *weakref.ProxyTypes)
_MOST_VALUES = 5000
"""So many are looked at for references, the nearest first."""
_MOST_ITEMS = 4096
"""Nor are they in longer containers."""


def referent(reference: Any) -> Any:
    """What one stands for; None where that is no more."""
    try:
        # A proxy gives methods of the object, which are bound to that.
        return reference() if is_of(reference, weakref.ref) else reference.__reduce_ex__.__self__
    except ReferenceError:
        return None


def referents_in(values: Iterable[Any]) -> Iterator[Any]:
    """What references among some values stand for, and in containers and objects among them."""
    waiting, seen = deque(values), set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        value = waiting.popleft()
        if is_of(value, REFERENCES):
            yield referent(value)
        elif not is_of(value, SCALARS) and id(value) not in seen:
            seen.add(id(value))
            waiting += _inside(value)


def _inside(value: Any) -> Iterable[Any]:
    held = content(value)
    if isinstance(held, (dict, list, tuple, set, frozenset, deque)):
        return [] if len(held) > _MOST_ITEMS else held.values() if isinstance(held, dict) else held
    return members(value).values() if is_record(value) else []
