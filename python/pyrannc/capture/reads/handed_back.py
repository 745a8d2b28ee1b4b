"""What a forward puts into containers and objects that it is given: whoever gives them finds it there afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.containers import content, fill
from pyrannc.capture.user.members import fill_members, has_members, members
from pyrannc.capture.user.plain import same
from pyrannc.capture.user.row_lists import RowList

Path = tuple[Hashable, ...]
"""Positions, keys and names of attributes that lead to something, from the positional and the named arguments."""


@dataclass(frozen=True)
class Put:
    """What a call changes in a container or an object among its arguments.

    Attributes:
        path: where that is.
        names: positions, keys or attributes that are others than before, or new.
        gone: those that are no more.
    """

    path: Path
    names: tuple[Hashable, ...]
    gone: tuple[Hashable, ...]

    def into(self, holder: Any, values: Sequence[Any]) -> None:
        """Does the same to another container or object, with these values."""
        contents = _contents(holder) | dict(zip(self.names, values, strict=True))
        _fill(holder, {name: value for name, value in contents.items() if name not in self.gone})


class Given:
    """Arguments as they are before a call.

    Args:
        arguments: positional and named ones.
    """

    def __init__(self, arguments: Any) -> None:
        self._found = [(path, holder, _contents(holder)) for path, holder in _holders(arguments, (), {})]

    def puts(self) -> list[Put]:
        """What the call has changed."""
        return [put for path, holder, before in self._found if (put := _put(path, before, _contents(holder)))]

    def with_puts(self, result: Any, puts: Sequence[Put]) -> tuple[Any, list[list[Any]]]:
        """A result of the call, and what stands where it puts something.

        Raises:
            LookupError: nothing does.
        """
        contents = {path: _contents(holder) for path, holder, _ in self._found}
        values = [[contents[put.path][name] for name in put.names] for put in puts]
        return result, [[_without_numbers(value, name) for value, name in zip(own, put.names, strict=True)]
                        for own, put in zip(values, puts, strict=True)]  # fmt: skip

    def put_back(self) -> None:
        """Leaves them as they were."""
        for _, holder, before in self._found:
            now = _contents(holder)
            # An equal that has come for a container may be what that has itself been changed to.
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                _fill(holder, before)


@contextmanager
def as_given(arguments: Any) -> Iterator[Given]:
    """Afterwards the arguments of a call are as they were before."""
    given = Given(arguments)
    try:
        yield given
    finally:
        given.put_back()


def _without_numbers(value: Any, name: Hashable) -> Any:
    """What raises where it is used, in the place of numbers of the trace."""
    absent = Absent(
        f"the model puts a number that it computes from the batch into {name!r} of an argument, which RaNNC does not "
        "hand back: compute it outside of the model, or put a tensor there"
    )
    return pytree.tree_map(lambda leaf: absent if isinstance(leaf, SYMBOLIC) else leaf, value)


def hand_back(puts: Sequence[Put], values: Sequence[Sequence[Any]], arguments: Any) -> None:
    """Puts into arguments what a call puts there."""
    holders = [_at(arguments, put.path) for put in puts]
    for put, holder, own in zip(puts, holders, values, strict=True):
        put.into(holder, own)


def _holders(item: Any, path: Path, seen: dict[int, Any]) -> Iterator[tuple[Path, Any]]:
    """Containers and objects that can be changed, each once."""
    contents = _contents(item)
    if not contents and not _may_change(item):
        return
    if id(item) in seen:
        return
    seen[id(item)] = item
    if _may_change(item):
        yield path, item
    for name, value in contents.items():
        yield from _holders(value, (*path, name), seen)


def _may_change(item: Any) -> bool:
    return isinstance(item, (dict, list, deque)) or has_members(item)


@dataclass(frozen=True)
class _Attribute:
    """The name of one that stands beside items."""

    name: str

    def __repr__(self) -> str:
        return f".{self.name}"


def _contents(item: Any) -> dict[Hashable, Any]:
    """Items and attributes."""
    if isinstance(item, RowList) or not isinstance(item, (dict, list, tuple, deque)):
        return dict(members(item).items())
    held = content(item)
    items: dict[Hashable, Any] = dict(held) if isinstance(held, dict) else dict(enumerate(held))
    return items | {_Attribute(name): value for name, value in members(item).items()}


def _fill(holder: Any, contents: dict[Hashable, Any]) -> None:
    if not isinstance(holder, (dict, list, deque)):
        fill_members(holder, {str(name): value for name, value in contents.items()})
        return
    items = {name: value for name, value in contents.items() if not isinstance(name, _Attribute)}
    fill(holder, items if isinstance(holder, dict) else items.values())
    fill_members(holder, {name.name: value for name, value in contents.items() if isinstance(name, _Attribute)})


def _put(path: Path, before: dict[Hashable, Any], now: dict[Hashable, Any]) -> Put | None:
    names = [name for name, value in now.items() if name not in before or not same(before[name], value)]
    gone = [name for name in before if name not in now]
    return Put(path, tuple(names), tuple(gone)) if names or gone else None


def _at(arguments: Any, path: Path) -> Any:
    for name in path:
        arguments = _contents(arguments)[name]
    return arguments
