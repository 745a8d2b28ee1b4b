"""What the forward sets in Python and a captured call does not: reading it is an error, not an old value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pyrannc.call.variant import Variant
from pyrannc.capture.reads.assumptions import Attribute
from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.holders import NOTHING, Holder
from pyrannc.capture.user.left import lift


class StaleAttributes:
    """The attributes of a deployed model that captured calls set, and what they set elsewhere."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[nn.Module, Any]] = {}
        self._absent: dict[tuple[int, str], Absent] = {}
        self._holders: dict[int, Holder] = {}

    def mark(self, variant: Variant) -> None:
        """Puts what raises in the place of what a captured call would set, whatever a script has set since."""
        state = variant.captured.python_state
        for attribute in state.written:
            own, key = vars(attribute.module), (id(attribute.module), attribute.name)
            now = own.get(attribute.name, NOTHING)
            if not isinstance(now, Absent):
                self._before[key] = attribute.module, now
                own[attribute.name] = self._absent.setdefault(key, _absent(attribute))
        for unsets in state.unset:
            unsets.put()
            self._holders[id(unsets.holder.owner)] = unsets.holder

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, what was there is there."""
        absent = self._lift()
        unset = [(holder, held) for holder in self._holders.values() if (held := lift(holder)) is not None]
        try:
            yield
        finally:
            for (_, name), (module, value) in absent.items():
                vars(module)[name] = value
            for holder, held in unset:
                holder.fill(held)

    def keep_computed(self) -> None:
        """What was computed from parameters, which have changed since, is not put back."""
        self._before = {
            key: (module, before)
            for key, (module, before) in self._before.items()
            if not (isinstance(before, Tensor) and before.requires_grad)
        }

    def clear(self) -> None:
        """Puts back what was there."""
        self._lift()
        for holder in self._holders.values():
            lift(holder)
        for known in (self._before, self._absent, self._holders):
            known.clear()

    def _lift(self) -> dict[tuple[int, str], tuple[nn.Module, Absent]]:
        """Puts back what was there, where nobody has set something else since; gives what stood in its place."""
        lifted = {}
        for key, (module, before) in self._before.items():
            now = vars(module).get(key[1])
            if isinstance(now, Absent):
                lifted[key] = module, now
                del vars(module)[key[1]]
                if before is not NOTHING:
                    vars(module)[key[1]] = before
        return lifted


def _absent(attribute: Attribute) -> Absent:
    return Absent(
        f"the {attribute} is set by the forward ({attribute.where}), which runs when the model is captured and "
        "never again, so it has no value; return it from the forward instead, or call the wrapped model itself after "
        "undeploy()"
    )
