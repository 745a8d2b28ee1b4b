"""Python values that are compared by value."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from .kinds import is_of, is_of_numpy

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Scalars."""


def is_plain(value: Any) -> bool:
    """True for scalars, and containers of them."""
    if is_of(value, (tuple, list, set, frozenset, deque)):
        return all(map(is_plain, value))
    if is_of(value, dict):
        return all(map(is_plain, value.values()))
    return is_of(value, PLAIN) or is_of_numpy(value, "number")


def same(before: Any, now: Any) -> bool:
    """True for one object, and for plain values that are equal and of one type."""
    if before is now:
        return True
    return type(before) is type(now) and is_plain(before) and is_plain(now) and bool(before == now)
