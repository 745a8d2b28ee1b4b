"""What later values are compared with: copies of containers, and the types of what is in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.holdings import SCALARS
from pyrannc.capture.user.kinds import is_of, is_of_numpy
from pyrannc.capture.user.references import REFERENCES, referent

WATCHED_ITEMS = 4096
"""Longer containers are watched by identity and length only."""
WATCHED_VALUES = 20_000
"""Of values in what is watched, however deep, so many are looked at, the nearest first."""
NUMBERS = (bool, int, float, complex)
"""Types of numbers that may be equal."""

_ORDERED = (dict, list, tuple, deque)
_CONTAINERS = (dict, list, set, tuple, deque, bytearray)


def kept(value: Any) -> Any:
    """What a later value is compared with."""
    if is_of(value, _CONTAINERS):
        return _copied(value, {})
    if is_of(value, REFERENCES):
        return value if referent(value) is None else _Live(value)
    return _SameNumbers(value) if is_of_numpy(value, "ndarray") and value.size <= WATCHED_ITEMS else value


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Containers with containers in them, each once; what else is in them is itself, and so is one inside of itself."""
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value
    if not is_of(value, _CONTAINERS):
        return value
    if len(value) > WATCHED_ITEMS or len(known) > WATCHED_VALUES:
        known[id(value)] = _SameLength(value)
    elif _has_absent(value):
        known[id(value)] = _SameRest(value, known)
    elif isinstance(value, dict):
        known[id(value)] = {key: _copied(item, known) for key, item in dict.items(value)}
    elif isinstance(value, (list, tuple, deque)):
        kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        known[id(value)] = kind(_copied(item, known) for item in value)
    else:
        known[id(value)] = set(value) if isinstance(value, set) else bytes(value)
    return known[id(value)]


def _has_absent(container: Any) -> bool:
    return any(issubclass(kind, Absent) for kind in set(map(type, _items(container))))


def _items(container: Any) -> Collection[Any]:
    items: Collection[Any] = dict.values(container) if isinstance(container, dict) else container
    return items


class Types:
    """The types of values, and of what is in them: ``True``, ``1`` and ``1.0`` are equal.

    Args:
        found: values, some for each holder.
    """

    def __init__(self, found: Sequence[tuple[Any, ...]]) -> None:
        values = list(chain.from_iterable(found))
        self._types = list(map(type, values))
        self._inside = [
            (place, value if isinstance(value, tuple) and all(map(SCALARS.__contains__, types[1:])) else self, types)
            for place, value in enumerate(values)
            if isinstance(types := _types_in(value), list)
        ]
        """Of containers with numbers somewhere in them: the place, a tuple that cannot change, and the types."""

    def are_of(self, found: Sequence[tuple[Any, ...]]) -> bool:
        """True when values, equal to the former ones, are also of their types."""
        values = list(chain.from_iterable(found))
        return list(map(type, values)) == self._types and all(
            values[place] is seen or _types_in(values[place]) == types for place, seen, types in self._inside
        )


def _types_in(value: Any, depth: int = 3) -> Any:
    """The type of a value, or of a container with numbers its type and those of its items."""
    kind = type(value)
    if kind in SCALARS or not isinstance(value, _ORDERED) or not depth or len(value) > WATCHED_ITEMS:
        return kind
    if _has_absent(value):
        return kind
    items = [_types_in(item, depth - 1) for item in _items(value)]
    return [kind, *items] if any(item in NUMBERS or isinstance(item, list) for item in items) else kind


class _Live:
    """Equals one weak reference or proxy for as long as it stands for something."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def __eq__(self, other: object) -> bool:
        mine = referent(self._reference)
        # In the place of a proxy, the object itself is compared.
        return mine is not None and (other is self._reference or other is mine)

    def __hash__(self) -> int:
        return id(self._reference)


class _SameNumbers:
    """Equals one array of NumPy for as long as it has the same numbers."""

    __array_ufunc__ = None
    """NumPy leaves comparisons to this class."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._numbers = array.tobytes()

    def __eq__(self, other: object) -> bool:
        return self._array.tobytes() == self._numbers and other is self._array

    def __hash__(self) -> int:
        return id(self._array)


class _SameLength:
    """Equals one container for as long as it has as many items."""

    def __init__(self, container: Any) -> None:
        self._container: Any = container
        self._length = len(container)

    def __eq__(self, other: object) -> bool:
        return other is self._container and len(other) == self._length

    def __hash__(self) -> int:
        return id(self._container)


class _SameRest:
    """Equals one container for as long as it holds the same beside what the forward sets there, whatever that is now.

    Args:
        container: with what raises in the place of that.
        known: copies of containers in it.
    """

    def __init__(self, container: Any, known: dict[int, Any]) -> None:
        self._container = container
        items = dict.items(container) if isinstance(container, dict) else ()
        self._set = {name for name, value in items if is_of(value, Absent)}
        # Kept, so that its id stays its own.
        self._own = self._without(container)
        self._rest = _copied(self._own, known)

    def __eq__(self, other: object) -> bool:
        return other is self._container and bool(self._without(other) == self._rest)

    def __hash__(self) -> int:
        return id(self._container)

    def _without(self, container: Any) -> Any:
        if isinstance(container, dict):
            return {name: value for name, value in dict.items(container) if name not in self._set}
        return [value for value in container if not is_of(value, Absent)]
