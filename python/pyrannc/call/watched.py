"""Which attributes and variables the guards of a captured call look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

from torch import Tensor, nn

from pyrannc.call.kept_values import WATCHED_ITEMS, WATCHED_VALUES
from pyrannc.capture import INTERNAL, is_plain
from pyrannc.capture.torch_internals.modules import own_buffers, own_modules, own_params
from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.holdings import SCALARS, Slots, is_record, is_users_own
from pyrannc.capture.user.kinds import is_of

Holder = Mapping[str, Any]
"""What has attributes or variables, by their names."""


class Watched:
    """Which attributes of which objects are watched, each once.

    Attributes:
        functions: that stand in what is watched.
        helpers: objects of the user's own classes there.
    """

    def __init__(self) -> None:
        self.names: dict[int, tuple[Holder, set[str]]] = {}
        self.tensors: list[tuple[Holder, str, Tensor]] = []
        self.absent: dict[int, tuple[Holder, set[str]]] = {}
        self.objects: list[Holder] = []
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
        slots = next((slots for slots in Slots.of(module) if name in slots), None)
        if slots is not None:
            self._add(slots, name)
            return
        for holder in (own, *registered):
            self.absent.setdefault(id(holder), (holder, set()))[1].add(name)
        self._add_of_class(type(module), name)

    def _add_of_class(self, kind: type, name: str) -> None:
        """What a class, or the first of its bases that has the name, has by it."""
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if owner is None:
            return
        value, proxy = vars(owner)[name], self._proxies.setdefault(owner, vars(owner))
        if isinstance(value, FunctionType) and is_users_own(owner):
            self._note(proxy, name)
            self.functions.append(value)
        elif is_users_own(owner) or is_plain(value) or is_record(value):
            self._add(proxy, name)

    def add_stranger(self, module: nn.Module) -> None:
        """A module that the model calls and that is no sub-module."""
        for name in vars(module):
            if name not in INTERNAL:
                self._add(vars(module), name)

    def add_global(self, held: Holder, name: str) -> None:
        """A global variable, or an attribute of an object in one, there or not."""
        if name in held:
            self._note(held, name)
        else:
            self.absent.setdefault(id(held), (held, set()))[1].add(name)

    def look_into_values(self) -> None:
        """Adds attributes of objects in what has been added, but for globals, and of objects in these."""
        seen: set[int] = set()
        left = WATCHED_VALUES
        while self._waiting and left > 0:
            value = self._waiting.popleft()
            if not is_of(value, SCALARS) and id(value) not in seen:
                seen.add(id(value))
                before = len(self._waiting)
                self._look_into(value)
                left -= len(self._waiting) - before

    def _add(self, holder: Holder, name: str) -> None:
        self._note(holder, name)
        self._waiting.append(holder[name])

    def _note(self, holder: Holder, name: str) -> None:
        value = holder[name]
        if is_of(value, Absent):
            # The forward sets it, without having read it.
            return
        if not is_of(value, Tensor):
            self.names.setdefault(id(holder), (holder, set()))[1].add(name)
        elif (id(holder), name) not in self._known_tensors:
            self._known_tensors.add((id(holder), name))
            self.tensors.append((holder, name, value))

    def _look_into(self, value: Any) -> None:
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            if len(value) <= WATCHED_ITEMS and not is_plain(value):
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


def _holders(value: Any) -> list[Holder]:
    """Where an object has its attributes."""
    return [*([vars(value)] if hasattr(value, "__dict__") else []), *Slots.of(value)]
