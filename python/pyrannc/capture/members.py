"""What objects hold that are no containers: attributes, in their dictionaries and in slots."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from .holdings import is_users_own, slots_of


def has_members(item: Any) -> bool:
    """True for objects that hold what somebody has put there; those of packages that can be called are functions."""
    if isinstance(item, (dict, list, tuple, set, frozenset, Tensor, nn.Module, ModuleType, FunctionType, type)):
        return False
    if callable(item) and not is_users_own(type(item)):
        return False
    if isinstance(getattr(item, "__dict__", None), dict):
        return True
    return is_users_own(type(item)) and any(map(slots_of, type(item).__mro__))


def members(item: Any) -> dict[str, Any]:
    """Attributes by name; none for what has no members."""
    if not has_members(item):
        return {}
    return {**getattr(item, "__dict__", {}), **{name: getattr(item, name) for name in _filled_slots(item)}}


def fill_members(item: Any, contents: Mapping[str, Any]) -> None:
    """Leaves an object with these attributes and no others, past its own ways to set them: it may be frozen."""
    own = getattr(item, "__dict__", {})
    slots = {name for kind in type(item).__mro__ for name in slots_of(kind)}
    for name in members(item).keys() - contents.keys():
        if name in slots:
            object.__delattr__(item, name)
        else:
            del own[name]
    for name, value in contents.items():
        if name in slots:
            object.__setattr__(item, name, value)
        else:
            own[name] = value


def twin(item: Any) -> Any:
    """Another object of the same class, whose members are to be filled: it may have none yet."""
    try:
        # Past a user's own way to set attributes, which copies would take where there are slots.
        return object.__new__(type(item))
    except TypeError:
        # It holds more than members, as an exception does.
        return copy.copy(item)


def _filled_slots(item: Any) -> Iterator[str]:
    return (name for kind in type(item).__mro__ for name in slots_of(kind) if hasattr(item, name))
