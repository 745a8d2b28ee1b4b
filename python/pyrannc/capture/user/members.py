"""What objects hold beside items: attributes, in their dictionaries and in slots."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from .holdings import is_users_own, slots_of, users_slots


def has_members(item: Any) -> bool:
    """True for objects that hold what somebody has put there; those of packages that can be called are functions."""
    if isinstance(item, (Tensor, nn.Module, ModuleType, FunctionType, type)):
        return False
    if callable(item) and not is_users_own(type(item)):
        return False
    return _dictionary(item) is not None or bool(users_slots(type(item)))


def members(item: Any) -> dict[str, Any]:
    """Attributes by name; none for what has no members. Slots of packages, as of a path, are caches of theirs."""
    if not has_members(item):
        return {}
    found = dict(_dictionary(item) or {})
    for name, slot in users_slots(type(item)).items():
        try:
            # As the class holds it: what the user's own ways to read it do is not wanted here.
            found[name] = slot.__get__(item, type(item))
        except AttributeError:
            continue
    return found


def fill_members(item: Any, contents: Mapping[str, Any]) -> None:
    """Leaves an object with these attributes and no others, past its own ways to set them: it may be frozen."""
    own = _dictionary(item)
    slots = users_slots(type(item))
    for name in members(item).keys() - contents.keys():
        if name in slots:
            slots[name].__delete__(item)
        elif own is not None:
            del own[name]
    for name, value in contents.items():
        if name in slots:
            slots[name].__set__(item, value)
        elif own is not None:
            own[name] = value


def twin(item: Any) -> Any:
    """Another object of the same class that holds the same."""
    if hasattr(type(item), "__copy__"):
        return copy.copy(item)
    try:
        made = object.__new__(type(item))
    except TypeError:
        # It holds more than members, as an exception does.
        return copy.copy(item)
    own = _dictionary(made)
    if own is not None:
        own.update(_dictionary(item) or {})
    for kind in type(item).__mro__:
        for _, slot in slots_of(kind):
            try:
                slot.__set__(made, slot.__get__(item, type(item)))
            except AttributeError:
                continue
    return made


def _dictionary(item: Any) -> dict[str, Any] | None:
    try:
        own = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None
    # A dict may be its own attributes.
    return own if isinstance(own, dict) and own is not item else None
