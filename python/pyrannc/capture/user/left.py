"""What stands, for scripts and for a second trace, where a forward has left something beside the model's attributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.errors import CaptureError, RaNNCError

from .absent import Absent
from .holders import NOTHING, Contents, Holder, Name
from .kinds import is_of
from .plain import PLAIN
from .source import Place, belongs_to_user


class Unset(Absent):
    """Stands where a captured call leaves nothing.

    Attributes:
        before: what had been there.
    """

    def __init__(self, called: Name, before: Any) -> None:
        super().__init__(
            f"the {called} is set by the forward, which runs when the model is captured and never again, so it has no "
            "value; return it from the forward instead"
        )
        self.before = before


class LeftTensor(Absent):
    """Stands in a second trace for a tensor that a call has left, which the next one must not read."""

    def __init__(self, called: Name) -> None:
        super().__init__(str(called))

    def error(self) -> RaNNCError:
        """What any use of it raises."""
        return reads_left(_users_line(), str(self))


def reads_left(where: Place, called: str) -> CaptureError:
    """The error for a forward that reads what an earlier call has left."""
    return CaptureError(
        f"{where} reads a tensor that an earlier call of the model has left in a Python object ({called}), where a "
        "captured call leaves nothing. Register it as a buffer (self.register_buffer(...)) and change it with copy_(), "
        "or return it from the forward and give it to the next call as an argument"
    )


def _users_line() -> Place:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not belongs_to_user(frame.f_code.co_filename):
        frame = frame.f_back
    return Place("") if frame is None else Place("", frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True)
class Unsets:
    """What stands in one holder for what a captured call leaves there."""

    holder: Holder
    values: dict[Any, Unset]

    def put(self) -> None:
        """Puts all of them there, in the place of what somebody may have put there since."""
        now = self.holder.contents()
        if self.holder.is_ordered:
            held = set(map(id, now.values()))
            new = {name: value for name, value in self.values.items() if id(value) not in held}
            # Behind what a script has put there since.
            new = {name if now.get(name) is value.before else len(now) + name: value for name, value in new.items()}
        else:
            new = {name: value for name, value in self.values.items() if now.get(name) is not value}
        for name, value in new.items():
            if not is_of(now.get(name), Absent):
                value.before = now.get(name, NOTHING)
        if new:
            self.holder.fill(now | new)


def without_unsets(holder: Holder, contents: Contents) -> Contents:
    """Contents of a holder as they were before; themselves where nothing of that kind is there."""
    if Unset not in set(map(type, contents.values())):
        return contents
    lifted = {name: value.before if is_of(value, Unset) else value for name, value in contents.items()}
    held = {name: value for name, value in lifted.items() if value is not NOTHING}
    return dict(enumerate(held.values())) if holder.is_ordered else held


def lift(holder: Holder) -> Contents | None:
    """Puts back what was in a holder, and gives what was there instead; None if nothing was."""
    now = holder.contents()
    lifted = without_unsets(holder, now)
    if lifted is now:
        return None
    holder.fill(lifted)
    return now


@dataclass(frozen=True)
class Beside:
    """What one call leaves in a holder for the next one.

    Attributes:
        values: what a second trace finds there; nothing where something has gone.
    """

    holder: Holder
    values: Contents

    def put(self) -> None:
        """Leaves the holder so."""
        contents = self.holder.contents() | self.values
        self.holder.fill({name: value for name, value in contents.items() if value is not NOTHING})

    def keep(self, again: Sequence[Beside]) -> None:
        """Leaves for good the plain values that the next call leaves as they are, such as that something is done.

        Args:
            again: what that one leaves.
        """
        changed = {name for item in again if item.holder.owner is self.holder.owner for name in item.values}
        kept = {name: value for name, value in self.values.items() if isinstance(value, PLAIN) and name not in changed}
        # What goes on to be appended is not done once.
        if kept and not (changed and self.holder.is_ordered):
            self.holder.fill(self.holder.contents() | kept)

    def refusal(self) -> CaptureError:
        """The error for a next call that does something else."""
        name, value = next(iter(self.values.items()))
        called = self.holder.name(name)
        if any(isinstance(item, LeftTensor) for item in pytree.tree_leaves(value)):
            return reads_left(Place(""), str(called))
        return CaptureError(
            f"the forward counts from call to call: it reads and changes the {called}, which a captured call would "
            "find unchanged for ever. Change it outside of the forward and pass it as an argument, or register a "
            f'tensor as a buffer (self.register_buffer("{called.last}", torch.tensor(...))) and change that in place'
        )


@contextmanager
def found_beside(left: Sequence[Beside]) -> Iterator[None]:
    """While active, holders are as a call leaves them."""
    before = [(item.holder, item.holder.contents()) for item in left]
    try:
        for item in left:
            item.put()
        yield
    finally:
        for holder, contents in before:
            holder.fill(contents)
