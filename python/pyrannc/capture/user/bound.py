"""Methods, and the objects that they are bound to."""

from __future__ import annotations

from typing import Any


def bound_to(item: Any) -> Any:
    """What a method is bound to; None for anything else.

    Its class is asked: an object may have an answer to every name, such as a dict whose items are its attributes.
    """
    return item.__self__ if hasattr(type(item), "__self__") else None
