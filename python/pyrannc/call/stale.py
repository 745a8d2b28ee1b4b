"""Python attributes that the forward sets and a captured call does not: reading one is an error, not an old value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pyrannc.call.variant import Variant
from pyrannc.capture.absent import Absent

_NOTHING = object()


class StaleAttributes:
    """The attributes of a deployed model that captured calls set."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def mark(self, variant: Variant) -> None:
        """Puts what raises in the place of what a captured call would set."""
        for attribute in variant.captured.python_state.written:
            own = vars(attribute.module)
            key = id(attribute.module), attribute.name
            self._before.setdefault(key, (attribute.module, own.get(attribute.name, _NOTHING)))
            own[attribute.name] = Absent(
                f"the {attribute} is set by the forward ({attribute.where}), which runs when the model is captured and "
                "never again, so it has no value; return it from the forward instead"
            )

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, what was there is there."""
        now = {key: vars(module).get(key[1], _NOTHING) for key, (module, _) in self._before.items()}
        self._put({key: before for key, (_, before) in self._before.items()})
        try:
            yield
        finally:
            self._put(now)

    def _put(self, values: Mapping[tuple[int, str], Any]) -> None:
        for key, value in values.items():
            (module, _), name = self._before[key], key[1]
            vars(module).pop(name, None)
            if value is not _NOTHING:
                vars(module)[name] = value

    def clear(self) -> None:
        """Puts back what was there."""
        for (_, name), (module, value) in self._before.items():
            if isinstance(vars(module).get(name), Absent):
                del vars(module)[name]
                if value is not _NOTHING:
                    vars(module)[name] = value
        self._before.clear()
