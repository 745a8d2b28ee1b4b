"""Functions that modules of the user have under names of theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from pyrannc.capture.torch_internals.patching import PatchPoint
from pyrannc.capture.user.source import belongs_to_user

_NAMES: Any = vars(ModuleType)["__dict__"]
"""What a module has by name, without asking the module."""


@contextmanager
def replaced_for_users(real: Callable[..., Any], substitute: Callable[..., Any], place: PatchPoint) -> Iterator[None]:
    """While active, another function stands at a place and wherever modules of the user have the real one."""
    with ExitStack() as stack:
        stack.callback(_give_back, substitute, real, frozenset(sys.modules))
        for point in (place, *_imported(real)):
            stack.enter_context(point.replaced_by(substitute))
        yield


def _give_back(substitute: object, real: object, known: Set[str]) -> None:
    """Modules that were first imported meanwhile, unlike the known ones, have what stood there."""
    for point in _imported(substitute, known):
        setattr(point.owner, point.name, real)


def _imported(function: object, known: Set[str] = frozenset()) -> list[PatchPoint]:
    """Where modules of the user, but for the known ones, have a function under a name of theirs."""
    found = []
    for module in [module for name, module in list(sys.modules.items()) if name not in known]:
        # Some stand for modules that are not there, and fail when they are asked.
        names = _NAMES.__get__(module) if isinstance(module, ModuleType) else {}
        file = names.get("__file__")
        if names.get("__name__") == "__main__" or (isinstance(file, str) and belongs_to_user(file)):
            found += [PatchPoint(module, name) for name, value in list(names.items()) if value is function]
    return found
