"""What kind of object something is, without a question to the object."""

from __future__ import annotations

import sys
from typing import Any


def is_of(value: Any, kinds: Any) -> bool:
    """``isinstance()`` by the type alone: a ``weakref.proxy`` of what is no more answers nothing, and raises."""
    return issubclass(type(value), kinds)


def is_of_numpy(value: Any, kind: str) -> bool:
    """Likewise for a class of NumPy, by name; where nobody has imported that there are none of its objects."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and is_of(value, getattr(numpy, kind))
