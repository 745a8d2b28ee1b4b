"""``WORLD_SIZE`` of the environment, where launchers say how many ranks there are: it may be handed on, not used."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from pyrannc.capture.torch_internals.patching import PatchPoint
from pyrannc.capture.user.source import belongs_to_user, module_of

_READ = PatchPoint(type(os.environ), "__getitem__")
_NAME = "WORLD_SIZE"
_READERS = ("os", "collections.abc")
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_OP")


class _Count(str):
    """The number as a text among all settings, which tells when code of the user makes it a number or compares it."""

    __slots__ = ()
    __hash__ = str.__hash__
    told: ClassVar[Callable[[int], None] | None] = None

    def __int__(self) -> int:
        return self._number(sys._getframe(1))

    def __float__(self) -> float:
        return float(self._number(sys._getframe(1)))

    def __eq__(self, other: object) -> bool:
        self._number(sys._getframe(1))
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        self._number(sys._getframe(1))
        return str.__ne__(self, other)

    def _number(self, used: FrameType) -> int:
        number = int(str(self))
        if _Count.told is not None and belongs_to_user(used.f_code.co_filename):
            _Count.told(number)
        return number


@contextmanager
def told_of_world_size(tell: Callable[[int], None]) -> Iterator[None]:
    """While active, ``tell`` is given the number when a forward reads it, or uses it where it reads all settings."""
    original, counts = _READ.original, dict[str, _Count]()

    def read(environment: Any, name: str) -> str:
        value: str = original(environment, name)
        if name != _NAME or not value.isdigit():
            return value
        if _is_read_alone(sys._getframe(1)):
            tell(int(value))
        # One object, as dictionaries of all settings may be compared.
        return counts.setdefault(value, _Count(value))

    before, _Count.told = _Count.told, tell
    try:
        with _READ.replaced_by(read):
            yield
    finally:
        _Count.told = before


def _is_read_alone(frame: FrameType | None) -> bool:
    """True where code of the user asks for this setting; not for all of them, as a copy does, or to load a module."""
    reader = frame
    while frame is not None and frame.f_code.co_name in ("get", "getenv") and module_of(frame) in _READERS:
        frame = frame.f_back
    if frame is None or not belongs_to_user(frame.f_code.co_filename) or frame.f_code.co_name == "<module>":
        return False
    return frame is not reader or dis.opname[frame.f_code.co_code[frame.f_lasti]] in _SUBSCRIPTS
