"""Objects of the user's own classes that sub-modules hold: plain values in them that a call changes for later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .assumptions import Attribute
from .holdings import is_users_own

_SCALARS = (type(None), bool, int, float, str)


class Helpers:
    """Those of a model, as they are before a call.

    What a call counts there without a use for it, as a meter does, changes nothing that is captured.

    Args:
        model: whose sub-modules hold them, in attributes.
        internal: attributes that are torch's.
    """

    def __init__(self, model: nn.Module, internal: frozenset[str]) -> None:
        self._kept: dict[int, tuple[Attribute, dict[str, Any]]] = {}
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in internal and _is_helper(value):
                    self._kept.setdefault(id(value), (Attribute(value, path, name), _scalars(value)))

    def changed(self) -> Iterator[tuple[Attribute, Any]]:
        """What is another value now, and which."""
        for held, before in self._kept.values():
            for name, value in _scalars(held.module).items():
                if name in before and (type(value) is not type(before[name]) or value != before[name]):
                    yield Attribute(held.module, held.path, name, held=held.name), value

    def put_back(self) -> None:
        """Gives all of them the values that they had."""
        for held, before in self._kept.values():
            vars(held.module).update(before)


def _is_helper(value: Any) -> bool:
    kind = type(value)
    return not isinstance(value, (nn.Module, Tensor, type)) and hasattr(value, "__dict__") and is_users_own(kind)


def _scalars(value: Any) -> dict[str, Any]:
    return {name: item for name, item in vars(value).items() if type(item) in _SCALARS}
