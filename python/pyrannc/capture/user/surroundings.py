"""What the user's code in a model can reach by name, and may leave something in."""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

from pyrannc.capture.torch_internals.modules import hooks_of_calls, own_modules

from .absent import Absent
from .bound import bound_to
from .containers import CONTAINERS, content
from .holders import Array, Cell, Container, Holder, Members, Name, OfClass, Variables
from .holdings import LRU_CACHE, SCALARS, is_array, is_filled, is_own, is_record, is_users_own, names_in
from .iterators import behind, is_iterator
from .kinds import is_of
from .left import Unset
from .members import has_members, members
from .plain import PLAIN

_MOST_ITEMS = 4096
"""Longer containers are looked after, but not what is in them."""
_FIXED = (*SCALARS, *PLAIN, Tensor, ModuleType, Absent)
"""What holds nothing that is looked after here."""
_MOST_VALUES = 20_000
"""So many values are looked at, the nearest first."""
_OF_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_Named: TypeAlias = tuple[Any, Name]


class Surroundings:
    """All of that but the attributes of the model's sub-modules, and containers that stand in them.

    Args:
        model: whose code it is.
        internal: attributes of modules that are torch's.

    Attributes:
        holders: of the user's things.
        caches: those of functions.
        iterators: of Python itself, with what they are called.
        unseen: the first thing that is left out, as there is too much.
    """

    def __init__(self, model: nn.Module, internal: frozenset[str]) -> None:
        self._internal = internal
        # Kept, so that an id names one object.
        self._seen: dict[int, Any] = {}
        self._variables: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self.holders: list[Holder] = []
        self.caches: list[Any] = []
        self.iterators: list[_Named] = []
        self.unseen: Name | None = None
        waiting = deque[_Named]()
        for path, module in model.named_modules():
            self._seen[id(module)] = module
            waiting += self._beside(module, f"sub-module '{path}'" if path else "the model")
        most = len(self._seen) + _MOST_VALUES
        while waiting and len(self._seen) < most:
            value, called = waiting.popleft()
            if self._is_new(value):
                self._seen[id(value)] = value
                waiting += self._inside(value, called)
        self.unseen = self.unseen or next((called for value, called in waiting if self._is_new(value)), None)
        for variables, of, names in self._variables.values():
            self.holders.append(Variables(variables, Name("global variable", (), of), names.__contains__))

    def _is_new(self, value: Any) -> bool:
        return (is_of(value, Unset) or not _is_fixed(value)) and id(value) not in self._seen

    def _beside(self, module: nn.Module, of: str) -> Iterator[_Named]:
        """What the code of a sub-module reaches."""
        named = Name("attribute", (), of)
        yield type(module), named
        for hooks in hooks_of_calls(module):
            yield from ((hook, named) for hook in hooks.values())
        for name, value in vars(module).items():
            if name in self._internal:
                continue
            if is_of(value, CONTAINERS) and id(value) not in self._seen:
                self._seen[id(value)] = value
                yield from self._items(value, named.attribute(name))
                yield from self._attributes(value, named.attribute(name))
            else:
                yield value, named.attribute(name)

    def _inside(self, value: Any, called: Name) -> Iterable[_Named]:
        if isinstance(value, Unset):
            return [(value.before, called)]
        if isinstance(value, CONTAINERS):
            self.holders.append(Container(value, called))
            return [*self._items(value, called), *self._attributes(value, called)]
        if isinstance(value, (tuple, frozenset)):
            return self._items(value, called)
        if isinstance(value, functools.partial):
            return [(part, called) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return [(value.__self__, called), (value.__func__, called)]
        if isinstance(value, LRU_CACHE):
            self.caches.append(value)
            return [(value.__wrapped__, called)]
        if isinstance(value, weakref.ref):
            return [(value(), called)]
        if is_iterator(value):
            self.iterators.append((value, called))
            return [(held, called) for held in behind(value)]
        if isinstance(value, (staticmethod, classmethod)):
            return [(value.__func__, called)]
        if isinstance(value, property):
            return [(value.fget, called), (value.fset, called)]
        if isinstance(value, functools.cached_property):
            return [(value.func, called)]
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, type):
            return self._of_class(value)
        if is_array(value):
            # What cannot be written, nobody changes.
            self.holders += [Array(value, called)] if value.size <= _MOST_ITEMS and value.flags.writeable else []
            return []
        if isinstance(value, nn.Module):
            return self._of_stranger(value, called)
        return self._of_object(value, called)

    def _of_function(self, function: FunctionType) -> Iterator[_Named]:
        code, own = function.__code__, is_own(function.__code__.co_filename)
        of = f"function {function.__qualname__}"
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            called = Name("variable", (name,), of)
            if own and id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self.holders.append(Cell(cell, called))
            if is_filled(cell):
                yield cell.cell_contents, called
        if not own:
            return
        named = Name("attribute", (), of)
        self.holders.append(Variables(function.__dict__, named, lambda _: True))
        yield function.__defaults__, named.attribute("__defaults__")
        yield function.__kwdefaults__, named.attribute("__kwdefaults__")
        yield from ((value, named.attribute(name)) for name, value in function.__dict__.items())
        yield from self._named_in(function.__globals__, _variables_in(code))
        for module in _modules_in(code, function.__globals__):
            # Of modules, what the function names.
            yield from self._named_in(vars(module), _names_of(code))

    def _named_in(self, variables: dict[str, Any], names: frozenset[str]) -> Iterator[_Named]:
        """Variables of a Python module that have these names, or may get them."""
        of = str(variables.get("__name__"))
        known = self._variables.setdefault(id(variables), (variables, of, set()))[2]
        new = names - known
        known.update(new)
        called = Name("global variable", (), of)
        yield from ((variables[name], called.attribute(name)) for name in new if name in variables)

    def _of_class(self, kind: type) -> Iterator[_Named]:
        if not is_users_own(kind):
            return
        called = Name("attribute", (), f"class {kind.__qualname__}")
        self.holders.append(OfClass(kind, called))
        yield from ((base, called) for base in kind.__bases__)
        yield from ((value, called.attribute(name)) for name, value in vars(kind).items())

    def _of_stranger(self, module: nn.Module, called: Name) -> Iterator[_Named]:
        """A module that is no sub-module, but for one that looks after a model itself."""
        if type(module).__module__.partition(".")[0] == __name__.partition(".")[0]:
            return
        self.holders.append(Variables(vars(module), called, lambda name: name not in self._internal))
        yield type(module), called
        own = [(name, value) for name, value in vars(module).items() if name not in self._internal]
        yield from ((value, called.attribute(name)) for name, value in (*own, *own_modules(module).items()))

    def _items(self, container: Any, called: Name) -> Iterator[_Named]:
        held = content(container)
        if len(held) <= _MOST_ITEMS:
            pairs = held.items() if isinstance(held, dict) else enumerate(held)
            yield from ((item, called.item(key)) for key, item in pairs if self._is_new(item))
            return
        if self.unseen is None and any(map(self._is_new, held.values() if isinstance(held, dict) else held)):
            self.unseen = called

    def _attributes(self, container: Any, called: Name) -> Iterable[_Named]:
        """What a container of a class of the user has besides items."""
        has_own = is_users_own(type(container)) and has_members(container)
        return self._of_members(container, called) if has_own else []

    def _of_object(self, value: Any, called: Name) -> Iterable[_Named]:
        return self._of_members(value, called) if is_record(value) else [(bound_to(value), called)]

    def _of_members(self, value: Any, called: Name) -> Iterator[_Named]:
        self.holders.append(Members(value, called))
        yield type(value), called
        yield from ((item, called.attribute(name)) for name, item in members(value).items() if self._is_new(item))


def _is_fixed(value: Any, depth: int = 8) -> bool:
    """True for what neither changes nor holds what does, as far as is looked."""
    if type(value) in SCALARS or is_of(value, _FIXED):
        return True
    return bool(depth) and is_of(value, (tuple, frozenset)) and all(_is_fixed(item, depth - 1) for item in value)


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> frozenset[str]:
    """What code names, but for names of Python's own."""
    return frozenset(name for name in names_in(code) if not name.startswith("__"))


@functools.lru_cache(maxsize=4096)
def _variables_in(code: CodeType) -> frozenset[str]:
    """Global variables that code, or that of a function made in it, reads or sets."""
    own = {item.argval for item in dis.get_instructions(code) if item.opname in _OF_VARIABLE}
    inner = [_variables_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(own).union(*inner) & _names_of(code)


def _modules_in(code: CodeType, variables: dict[str, Any]) -> Iterator[ModuleType]:
    """The user's Python modules that code names or imports."""
    for name in _names_of(code):
        found: Any = variables.get(name, sys.modules.get(name))
        if is_of(found, ModuleType) and is_own(getattr(found, "__file__", None)):
            yield found
