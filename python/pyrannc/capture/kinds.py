"""What kind of object something is, without a question to the object."""

from __future__ import annotations

from typing import Any


def is_of(value: Any, kinds: Any) -> bool:
    """``isinstance()`` by the type alone: a ``weakref.proxy`` of what is no more answers nothing, and raises."""
    return issubclass(type(value), kinds)
