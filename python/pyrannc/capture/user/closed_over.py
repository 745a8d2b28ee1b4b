"""What a function has been given before it is called."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from .holdings import is_filled


def closed_over(function: Any) -> Iterator[Any]:
    """The variables around a function, its defaults, and what ``functools.partial`` has given it."""
    if isinstance(function, functools.partial):
        yield from function.args
        yield from function.keywords.values()
        yield from closed_over(function.func)
    elif isinstance(function, MethodType):
        yield from closed_over(function.__func__)
    elif isinstance(function, FunctionType):
        yield from (cell.cell_contents for cell in function.__closure__ or () if is_filled(cell))
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
