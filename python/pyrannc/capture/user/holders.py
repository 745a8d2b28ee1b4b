"""Where Python code keeps what is no attribute of the model: containers, objects, classes, variables, cells."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import CellType
from typing import Any

from .containers import content, fill
from .holdings import SCALARS
from .members import fill_members, members

Contents = dict[Hashable, Any]
"""What a holder holds, by attribute, variable, key or position."""


class _Nothing(Enum):
    NOTHING = auto()


NOTHING = _Nothing.NOTHING
"""What stands for no value."""
_LONGEST = 40


@dataclass(frozen=True)
class Name:
    """What a user calls something that Python code keeps.

    Attributes:
        kind: of what it begins with.
        path: attributes and items, one of another.
        of: what has the first one.
    """

    kind: str
    path: tuple[str, ...]
    of: str

    def attribute(self, name: Hashable) -> Name:
        """An attribute of it."""
        return Name(self.kind, (*self.path, f".{name}" if self.path else str(name)), self.of)

    def item(self, key: Hashable) -> Name:
        """An item of it."""
        text = repr(key) if isinstance(key, SCALARS) else type(key).__name__
        return Name(self.kind, (*self.path, f"[{text[:_LONGEST]}]"), self.of)

    @property
    def last(self) -> str:
        """As a name for a buffer."""
        return self.path[-1].strip(".[]'\"")

    def __str__(self) -> str:
        return f'{self.kind} "{"".join(self.path)}" of {self.of}'


class Holder(ABC):
    """One of them.

    Attributes:
        owner: the container, object, class, dictionary or cell.
        called: it, or with ``name`` what it holds.
        is_ordered: its names are positions.
    """

    is_ordered = False

    def __init__(self, owner: Any, called: Name) -> None:
        self.owner = owner
        self.called = called

    def name(self, of: Hashable) -> Name:
        """What something in it is called."""
        return self.called.attribute(of)

    @abstractmethod
    def contents(self) -> Contents:
        """What it holds now."""

    @abstractmethod
    def fill(self, contents: Contents) -> None:
        """Leaves it with these and no others."""


class Container(Holder):
    """A list, a dictionary or another container."""

    def __init__(self, owner: Any, called: Name) -> None:
        super().__init__(owner, called)
        self.is_ordered = not isinstance(owner, dict)

    def name(self, of: Hashable) -> Name:
        """What an item is called."""
        return self.called.item(of)

    def contents(self) -> Contents:
        """The items."""
        held = content(self.owner)
        return dict(held) if isinstance(held, dict) else dict(enumerate(held))

    def fill(self, contents: Contents) -> None:
        """Leaves it with these items."""
        fill(self.owner, [*contents.values()] if self.is_ordered else contents)


class Array(Holder):
    """The numbers of an array of NumPy."""

    def name(self, of: Hashable) -> Name:
        """What a number is called, by its place in the whole array."""
        return self.called.item(of)

    def contents(self) -> Contents:
        """The numbers."""
        return dict(enumerate(self.owner.ravel().tolist()))

    def fill(self, contents: Contents) -> None:
        """Leaves it with these numbers."""
        self.owner.flat[:] = [*contents.values()]


class Members(Holder):
    """An object with attributes."""

    def contents(self) -> Contents:
        """The attributes."""
        return dict(members(self.owner).items())

    def fill(self, contents: Contents) -> None:
        """Leaves it with these attributes."""
        fill_members(self.owner, {str(name): value for name, value in contents.items()})


class Variables(Holder):
    """Some of a dictionary: of the variables of a Python module, or attributes of a function or a module of torch."""

    def __init__(self, owner: dict[str, Any], called: Name, is_one: Callable[[str], bool]) -> None:
        super().__init__(owner, called)
        self._is_one = is_one

    def contents(self) -> Contents:
        """Those of them that are there."""
        return {name: value for name, value in self.owner.items() if self._is_one(name)}

    def fill(self, contents: Contents) -> None:
        """Leaves those of them there."""
        _change(self.contents(), contents, self.owner.__setitem__, self.owner.__delitem__)


class OfClass(Holder):
    """A class of the user, and what it holds for all of its objects."""

    def contents(self) -> Contents:
        """Its attributes, but for those of Python."""
        return {name: value for name, value in vars(self.owner).items() if not name.startswith("__")}

    def fill(self, contents: Contents) -> None:
        """Leaves it with these."""
        # Past what its own class makes of that.
        _change(
            self.contents(),
            contents,
            lambda name, value: type.__setattr__(self.owner, name, value),
            lambda name: type.__delattr__(self.owner, name),
        )


class Cell(Holder):
    """A variable that a function has from the function that it is made in."""

    owner: CellType

    def name(self, of: Hashable) -> Name:
        """The variable itself."""
        return self.called

    def contents(self) -> Contents:
        """Its value, if it has one."""
        try:
            return {"": self.owner.cell_contents}
        except ValueError:
            return {}

    def fill(self, contents: Contents) -> None:
        """Gives it this value, or none."""
        if contents:
            self.owner.cell_contents = contents[""]
        elif self.contents():
            del self.owner.cell_contents


def _change(
    now: Mapping[Hashable, Any], contents: Contents, put: Callable[[Any, Any], Any], remove: Callable[[Any], Any]
) -> None:
    for name in now.keys() - contents.keys():
        remove(name)
    for name, value in contents.items():
        if now.get(name, NOTHING) is not value:
            put(name, value)
