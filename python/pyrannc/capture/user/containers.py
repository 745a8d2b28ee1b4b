"""Containers, by methods of the classes that hold items: a Counter's own would add, those of a user may do anything."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from .kinds import is_of

CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
"""Those classes."""


def content(value: Any) -> Any:
    """What is in a container, as one of a class that does nothing else; anything else is itself."""
    kind = next((kind for kind in CONTAINERS if is_of(value, kind)), None)
    if kind is None:
        return value
    return kind(kind.items(value)) if issubclass(kind, dict) else kind(kind.__iter__(value))


def fill(container: Any, content: Any) -> None:
    """Puts a content in the place of what a container holds."""
    kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    if isinstance(content, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    elif kind is set:
        kind.update(container, content)
    else:
        kind.extend(container, content)
