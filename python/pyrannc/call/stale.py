"""Python attributes that the forward sets and a captured call does not: reading one is an error, not an old value."""

from __future__ import annotations

from collections.abc import Iterator
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
        absent = self._lift()
        try:
            yield
        finally:
            for (_, name), (module, value) in absent.items():
                vars(module)[name] = value

    def clear(self) -> None:
        """Puts back what was there."""
        self._lift()
        self._before.clear()

    def _lift(self) -> dict[tuple[int, str], tuple[nn.Module, Absent]]:
        """Puts back what was there, where nobody has set something else since; gives what stood in its place."""
        lifted = {}
        for key, (module, before) in self._before.items():
            now = vars(module).get(key[1])
            if isinstance(now, Absent):
                lifted[key] = module, now
                del vars(module)[key[1]]
                if before is not _NOTHING:
                    vars(module)[key[1]] = before
        return lifted
