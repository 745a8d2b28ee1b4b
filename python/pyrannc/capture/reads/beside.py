"""What a traced call leaves beside the model's attributes: in helper objects, containers, classes, global variables."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.containers import content
from pyrannc.capture.user.holders import NOTHING, Contents, Holder, Name
from pyrannc.capture.user.holdings import SCALARS, cells_of, is_record
from pyrannc.capture.user.iterators import Taking
from pyrannc.capture.user.kinds import is_of
from pyrannc.capture.user.left import Beside, LeftTensor, Unset, Unsets, lift, without_unsets
from pyrannc.capture.user.members import members
from pyrannc.capture.user.plain import PLAIN, is_plain, same
from pyrannc.capture.user.surroundings import Surroundings

STAND_INS = {torch.SymInt: 3, torch.SymFloat: 0.7, torch.SymBool: True}
"""Numbers of a trace, for another one."""
_COUNTING = (int, float, complex)
_MOST_VALUES = 1000
"""So many are looked at for tensors in what has been left."""
_DependsOnData = Callable[[Any], bool]


class BesideLog:
    """Its surroundings as they are before a call, and what that changes there.

    What is made on first use and holds no tensor stays, such as a function that is looked up once, as does the note
    that something is done. Numbers that a call counts without a use for them, as a meter does, change nothing that is
    captured, and are put back.

    Args:
        model: whose call it is.
        internal: attributes of modules that are torch's.

    Attributes:
        left: what the next call finds.
        unset: what stands for what depends on data.
        cached: tensors that sizes alone decide.
        unseen: from where on its surroundings are not looked at.
    """

    def __init__(self, model: nn.Module, internal: frozenset[str]) -> None:
        found = Surroundings(model, internal)
        self._before = [(holder, holder.contents()) for holder in found.holders]
        self._caches = [(cache, cache.cache_info().misses) for cache in found.caches]
        self._taking = [Taking(iterator, called) for iterator, called in found.iterators]
        self.left: list[Beside] = []
        self.unset: list[Unsets] = []
        self.cached: list[Name] = []
        self.unseen = found.unseen

    def lift(self) -> None:
        """What stands for what earlier calls have left gives way to what was there."""
        for holder, before in self._before:
            if without_unsets(holder, before) is not before:
                lift(holder)

    def note(self, depends_on_data: _DependsOnData) -> None:
        """Finds out what the call has left, right after it.

        Args:
            depends_on_data: asked of tensors and of numbers of the trace.

        Raises:
            CaptureError: the call takes something from an iterator that was there before.
        """
        for taking in self._taking:
            taking.refuse_taken()
        for holder, before in self._before:
            change = _Change(holder, without_unsets(holder, before))
            if not change:
                continue
            left, unset = change.left(depends_on_data)
            self.left += [Beside(holder, left)] if left else []
            self.unset += [Unsets(holder, unset)] if unset else []
            self.cached += change.cached(depends_on_data)

    def put_back(self) -> None:
        """Leaves all as it was before the call."""
        for holder, before in self._before:
            _Change(holder, before).undo()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses and _keeps_tensors(cache):
                cache.cache_clear()


class _Change:
    """What is in a holder that was not there before."""

    def __init__(self, holder: Holder, before: Contents) -> None:
        self._holder, self._before = holder, before
        self._now = holder.contents()
        self._is_same = len(self._now) == len(before) and all(map(is_, self._now.values(), before.values()))
        self._is_same = self._is_same and self._now.keys() == before.keys()

    def __bool__(self) -> bool:
        return not self._is_same

    def left(self, depends_on_data: _DependsOnData) -> tuple[Contents, dict[Any, Unset]]:
        """What the next call finds under these names, and what stands for what depends on data."""
        left: Contents = {}
        unset: dict[Any, Unset] = {}
        for name, value in self._new():
            before, called = self._before.get(name, NOTHING), self._holder.name(name)
            held = list(_held(value))
            is_of_data = any(map(depends_on_data, held)) or (bool(held) and isinstance(before, Tensor))
            if is_of_data:
                unset[name] = Unset(called, before)
            if is_of_data or (held and not any(isinstance(item, Tensor) for item in held)):
                left[name] = pytree.tree_map(functools.partial(_for_a_second, called), content(value))
            elif is_plain(value):
                left[name] = content(value)
            elif self._is_moved(value):
                left[name] = value
        left |= dict.fromkeys(self._gone(), NOTHING)
        return left, unset

    def cached(self, depends_on_data: _DependsOnData) -> Iterator[Name]:
        """Tensors that have been left, if none of these depends on data."""
        for name, value in self._new():
            held = list(_held(value))
            if any(isinstance(item, Tensor) for item in held) and not any(map(depends_on_data, held)):
                yield self._holder.name(name)

    def undo(self) -> None:
        """Puts back what was there, but for what is made on first use."""
        if self._is_same:
            return
        made = {name: value for name, value in self._new() if self._may_stay(name, value)}
        if not self._holder.is_ordered:
            self._holder.fill(self._before | made)
        elif self._gone() or any(self._is_other(name) for name in self._now.keys() - made.keys()):
            self._holder.fill(self._before)

    def _is_other(self, name: Any) -> bool:
        """Also where an equal has come for a container: that may itself have been changed."""
        return self._before.get(name, NOTHING) is not self._now[name]

    def _new(self) -> Iterator[tuple[Any, Any]]:
        return (item for item in self._now.items() if not same(self._before.get(item[0], NOTHING), item[1]))

    def _gone(self) -> list[Any]:
        return [name for name in self._before if name not in self._now]

    def _is_moved(self, value: Any) -> bool:
        return self._holder.is_ordered and any(value is other for other in self._before.values())

    def _may_stay(self, name: Any, value: Any) -> bool:
        if isinstance(self._before.get(name), Tensor) or any(True for _ in _held(value)):
            return False
        counts = isinstance(value, _COUNTING) and not isinstance(value, bool)
        is_flag = isinstance(value, PLAIN) and not counts and not self._holder.is_ordered
        return is_flag or not is_plain(value)


def _for_a_second(called: Name, item: Any) -> Any:
    """What stands in a second trace for something that has been left."""
    if isinstance(item, SYMBOLIC):
        return STAND_INS[type(item)]
    return LeftTensor(called) if any(True for _ in _held(item)) else item


def _held(value: Any) -> Iterator[Any]:
    """Tensors in a value, and numbers of a trace."""
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_VALUES:
        item = waiting.pop()
        if is_of(item, (Tensor, *SYMBOLIC)):
            yield item
        elif id(item) not in seen and not is_of(item, (*SCALARS, *PLAIN, type)):
            seen.add(id(item))
            waiting += _inside(item)


def _inside(item: Any) -> list[Any]:
    inside = content(item)
    if isinstance(inside, dict):
        return [*inside.values()]
    if isinstance(inside, (list, tuple, set, frozenset)) or type(inside).__name__ == "deque":
        return list(inside)
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, nn.Module):
        return [*vars(item).values()]
    if hasattr(item, "__closure__"):
        return cells_of(item)
    return [*members(item).values()] if is_record(item) else []


def _keeps_tensors(cache: Any) -> bool:
    """True for the cache of a function that has given tensors; only the garbage collector knows what it holds."""
    others = (vars(cache), cache.__wrapped__)
    found = [item for item in gc.get_referents(cache) if not any(item is other for other in others)]
    return any(True for item in found for _ in _held(item))
