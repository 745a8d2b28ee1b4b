"""What a captured call took for granted of the model's Python side, checked before each further call."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture import INTERNAL, PythonState, is_plain
from pyrannc.capture.absent import Absent
from pyrannc.capture.global_reads import GlobalReads
from pyrannc.capture.holdings import SCALARS, Slots, is_record, is_users_own
from pyrannc.capture.hooks import refuse_new_hooks
from pyrannc.capture.torch_internals.modules import (
    hooks_of_all_calls,
    hooks_of_calls,
    own_buffers,
    own_modules,
    own_params,
)
from pyrannc.capture.torch_internals.tensors import version

_Holder = Mapping[str, Any]
_WATCHED_ITEMS = 4096
"""Longer containers are watched by identity and length only."""
_WATCHED_VALUES = 20_000
"""Of values in what is watched, however deep, so many are looked at, the nearest first."""

_ORDERED = (dict, list, tuple, deque)
_NUMBERS = (bool, int, float, complex)
_CONTAINERS = (dict, list, set, tuple, deque, bytearray)


class ModuleGuards:
    """Attributes that a captured call has read, sub-modules and hooks, as they were then.

    Comparing all of them takes one pass in C for each sub-module that has any.

    Args:
        model: right after the capture.
        state: what the call has read.
    """

    def __init__(self, model: nn.Module, state: PythonState) -> None:
        self._model = model
        watched = _Watched()
        for attribute in state.read:
            watched.add_read(attribute.module, attribute.name)
        for module in state.strangers:
            watched.add_stranger(module)
        watched.look_into_values()
        for held, name in (*state.globals, *GlobalReads({}, watched.functions, watched.helpers)):
            watched.add_global(held, name)
        self._objects = watched.objects
        self._sizes = list(map(len, self._objects))
        # Of one name, what looks names up gives no tuple.
        self._names = [(holder, sorted(names) * (1 + (len(names) == 1))) for holder, names in watched.names.values()]
        self._getters: list[tuple[Callable[[_Holder], Any], _Holder]] = [
            (itemgetter(*names), holder) for holder, names in self._names
        ]
        found = [get(holder) for get, holder in self._getters]
        self._values = [tuple(map(_kept, values)) for values in found]
        self._types = _Types(found)
        self._tensors = [(holder, name, tensor, version(tensor)) for holder, name, tensor in watched.tensors]
        self._absent = watched.absent
        self._owners = [holder for holder, _ in watched.absent.values()]
        self._lengths = list(map(len, self._owners))
        families = [own_modules(module) for module in model.modules()]
        self._childless = [family for family in families if not family]
        self._families = [family for family in families if family]
        self._children = [list(family.values()) for family in self._families]
        self._child_names = list(map(list, self._families))
        self._strangers = state.strangers
        self._grad_mode = state.grad_mode
        called = [*model.modules(), *state.strangers]
        hooks = [*hooks_of_all_calls(), *(hooks for module in called for hooks in hooks_of_calls(module))]
        self._hookless = [found for found in hooks if not found]
        self._hooked = [found for found in hooks if found]
        self._hook_keys = list(map(list, self._hooked))

    def hold(self) -> bool:
        """True when the captured call is still what the model would do.

        Raises:
            CaptureError: hooks of sub-modules have come or gone.
        """
        if any(self._hookless) or list(map(list, self._hooked)) != self._hook_keys:
            refuse_new_hooks(self._model, self._strangers)
            return False
        if self._grad_mode is not None and self._grad_mode is not torch.is_grad_enabled():
            return False
        try:
            found = [get(holder) for get, holder in self._getters]
            if found != self._values or not self._types.are_of(found):
                return False
        except Exception:  # an attribute is gone, or something that does not compare, a tensor or an array
            return False
        if any(self._childless) or list(map(list, self._families)) != self._child_names:
            return False
        if [list(family.values()) for family in self._families] != self._children:
            return False
        if list(map(len, self._objects)) != self._sizes:
            return False
        if list(map(len, self._owners)) != self._lengths and not self._still_absent():
            return False
        return all(
            holder.get(name) is tensor and version(tensor) == seen for holder, name, tensor, seen in self._tensors
        )

    def _still_absent(self) -> bool:
        if any(name in holder for holder, names in self._absent.values() for name in names):
            return False
        self._lengths = list(map(len, self._owners))
        return True

    def changed(self) -> str | None:
        """What is not as it was, if that has a name."""
        if self._grad_mode is not None and self._grad_mode is not torch.is_grad_enabled():
            return "the answer to torch.is_grad_enabled()"
        for (holder, names), values in zip(self._names, self._values, strict=True):
            for name, old in zip(names, values, strict=True):
                now = holder.get(name)
                try:
                    same = bool(now == old) and (not isinstance(old, _NUMBERS) or type(now) is type(old))
                except Exception:  # as in hold()
                    same = False
                if not same:
                    return f'"{name}" was {_short(old)} and is {_short(now)}'
        return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


class _Watched:
    """Which attributes of which objects are watched, each once.

    Attributes:
        functions: that stand in what is watched.
        helpers: objects of the user's own classes there.
    """

    def __init__(self) -> None:
        self.names: dict[int, tuple[_Holder, set[str]]] = {}
        self.tensors: list[tuple[_Holder, str, Tensor]] = []
        self.absent: dict[int, tuple[_Holder, set[str]]] = {}
        self.objects: list[_Holder] = []
        self.functions: list[FunctionType] = []
        self.helpers: list[Any] = []
        self._waiting: deque[Any] = deque()
        self._known_tensors: set[tuple[int, str]] = set()
        # Kept while ids serve as keys: the attributes of a class are looked at through a new proxy each time.
        self._proxies: dict[type, MappingProxyType[str, Any]] = {}

    def add_read(self, module: nn.Module, name: str) -> None:
        """An attribute that the forward has asked for, there or not."""
        own = vars(module)
        if name == "__dict__":
            self.objects.append(own)
        if name in INTERNAL or name.startswith("__"):
            return
        if name in own:
            self._add(own, name)
            return
        registered = own_params(module), own_buffers(module), own_modules(module)
        for holder in registered:
            if name in holder:
                if holder[name] is None:
                    self._add(holder, name)
                return
        for slots in Slots.of(module):
            if name in slots:
                self._add(slots, name)
                return
        for holder in (own, *registered):
            self.absent.setdefault(id(holder), (holder, set()))[1].add(name)
        for kind in type(module).__mro__:
            if name in vars(kind):
                value = vars(kind)[name]
                proxy = self._proxies.setdefault(kind, vars(kind))
                if isinstance(value, FunctionType) and is_users_own(kind):
                    self._note(proxy, name)
                    self.functions.append(value)
                elif is_users_own(kind) or is_plain(value) or is_record(value):
                    self._add(proxy, name)
                return

    def add_stranger(self, module: nn.Module) -> None:
        """A module that the model calls and that is no sub-module."""
        for name in vars(module):
            if name not in INTERNAL:
                self._add(vars(module), name)

    def add_global(self, held: _Holder, name: str) -> None:
        """A global variable, or an attribute of an object in one, there or not."""
        if name in held:
            self._note(held, name)
        else:
            self.absent.setdefault(id(held), (held, set()))[1].add(name)

    def look_into_values(self) -> None:
        """Adds attributes of objects in what has been added, but for globals, and of objects in these."""
        seen: set[int] = set()
        left = _WATCHED_VALUES
        while self._waiting and left > 0:
            value = self._waiting.popleft()
            if not isinstance(value, SCALARS) and id(value) not in seen:
                seen.add(id(value))
                before = len(self._waiting)
                self._look_into(value)
                left -= len(self._waiting) - before

    def _add(self, holder: _Holder, name: str) -> None:
        self._note(holder, name)
        self._waiting.append(holder[name])

    def _note(self, holder: _Holder, name: str) -> None:
        value = holder[name]
        if isinstance(value, Absent):
            # The forward sets it, without having read it.
            return
        if not isinstance(value, Tensor):
            self.names.setdefault(id(holder), (holder, set()))[1].add(name)
        elif (id(holder), name) not in self._known_tensors:
            self._known_tensors.add((id(holder), name))
            self.tensors.append((holder, name, value))

    def _look_into(self, value: Any) -> None:
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            if len(value) <= _WATCHED_ITEMS and not is_plain(value):
                self._waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, FunctionType):
            self.functions.append(value)
        elif isinstance(value, MethodType):
            self._waiting += value.__self__, value.__func__
        elif isinstance(value, partial):
            self._waiting += value.func, value.args
            self.objects.append(value.keywords)
            for name in value.keywords:
                self._add(value.keywords, name)
        elif is_record(value) or (isinstance(value, type) and is_users_own(value)):
            self._look_into_object(value)

    def _look_into_object(self, value: Any) -> None:
        is_class = isinstance(value, type)
        if is_users_own(value if is_class else type(value)):
            self.helpers.append(value)
        own: set[str] = set()
        for holder in [] if is_class else _holders(value):
            self.objects.append(holder)
            own.update(holder)
            for name in list(holder):
                self._add(holder, name)
        for kind in filter(is_users_own, value.__mro__ if is_class else type(value).__mro__):
            held = self._proxies.setdefault(kind, vars(kind))
            for name in held:
                if not name.startswith("__") and name not in own and is_plain(held[name]):
                    self._note(held, name)


def _holders(value: Any) -> list[_Holder]:
    """Where an object has its attributes."""
    return [*([vars(value)] if hasattr(value, "__dict__") else []), *Slots.of(value)]


def _kept(value: Any) -> Any:
    """What a later value is compared with."""
    if isinstance(value, _CONTAINERS):
        return _copied(value, {})
    # Where nobody has imported NumPy there are none of its arrays.
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return _SameNumbers(value) if is_array and value.size <= _WATCHED_ITEMS else value


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """Containers with containers in them, each once; what else is in them is itself, and so is one inside of itself."""
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = value
    if not isinstance(value, _CONTAINERS):
        return value
    if len(value) > _WATCHED_ITEMS or len(known) > _WATCHED_VALUES:
        known[id(value)] = _SameLength(value)
    elif any(isinstance(item, Absent) for item in _items(value)):
        known[id(value)] = _SameRest(value, known)
    elif isinstance(value, dict):
        known[id(value)] = {key: _copied(item, known) for key, item in dict.items(value)}
    elif isinstance(value, (list, tuple, deque)):
        kind = next(kind for kind in (list, tuple, deque) if isinstance(value, kind))
        known[id(value)] = kind(_copied(item, known) for item in value)
    else:
        known[id(value)] = set(value) if isinstance(value, set) else bytes(value)
    return known[id(value)]


def _items(container: Any) -> Collection[Any]:
    items: Collection[Any] = dict.values(container) if isinstance(container, dict) else container
    return items


class _Types:
    """The types of values, and of what is in them: ``True``, ``1`` and ``1.0`` are equal.

    Args:
        found: values, some for each holder.
    """

    def __init__(self, found: Sequence[tuple[Any, ...]]) -> None:
        values = list(chain.from_iterable(found))
        self._types = list(map(type, values))
        self._inside = [
            (place, value if isinstance(value, tuple) and all(map(SCALARS.__contains__, types[1:])) else self, types)
            for place, value in enumerate(values)
            if isinstance(types := _types_in(value), list)
        ]
        """Of containers with numbers somewhere in them: the place, a tuple that cannot change, and the types."""

    def are_of(self, found: Sequence[tuple[Any, ...]]) -> bool:
        """True when values, equal to the former ones, are also of their types."""
        values = list(chain.from_iterable(found))
        return list(map(type, values)) == self._types and all(
            values[place] is seen or _types_in(values[place]) == types for place, seen, types in self._inside
        )


def _types_in(value: Any, depth: int = 3) -> Any:
    """The type of a value, or of a container with numbers its type and those of its items."""
    kind = type(value)
    if kind in SCALARS or not isinstance(value, _ORDERED) or not depth or len(value) > _WATCHED_ITEMS:
        return kind
    if any(isinstance(item, Absent) for item in _items(value)):
        return kind
    items = [_types_in(item, depth - 1) for item in _items(value)]
    return [kind, *items] if any(item in _NUMBERS or isinstance(item, list) for item in items) else kind


class _SameNumbers:
    """Equals one array of NumPy for as long as it has the same numbers."""

    __array_ufunc__ = None
    """NumPy leaves comparisons to this class."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self._numbers = array.tobytes()

    def __eq__(self, other: object) -> bool:
        return self._array.tobytes() == self._numbers and other is self._array

    def __hash__(self) -> int:
        return id(self._array)


class _SameLength:
    """Equals one container for as long as it has as many items."""

    def __init__(self, container: Any) -> None:
        self._container: Any = container
        self._length = len(container)

    def __eq__(self, other: object) -> bool:
        return other is self._container and len(other) == self._length

    def __hash__(self) -> int:
        return id(self._container)


class _SameRest:
    """Equals one container for as long as it holds the same beside what the forward sets there, whatever that is now.

    Args:
        container: with what raises in the place of that.
        known: copies of containers in it.
    """

    def __init__(self, container: Any, known: dict[int, Any]) -> None:
        self._container = container
        items = dict.items(container) if isinstance(container, dict) else ()
        self._set = {name for name, value in items if isinstance(value, Absent)}
        # Kept, so that its id stays its own.
        self._own = self._without(container)
        self._rest = _copied(self._own, known)

    def __eq__(self, other: object) -> bool:
        return other is self._container and bool(self._without(other) == self._rest)

    def __hash__(self) -> int:
        return id(self._container)

    def _without(self, container: Any) -> Any:
        if isinstance(container, dict):
            return {name: value for name, value in dict.items(container) if name not in self._set}
        return [value for value in container if not isinstance(value, Absent)]
