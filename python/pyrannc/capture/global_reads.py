"""Global variables that code of the user reads, and attributes of the objects that stand in them."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeAlias

from torch import nn

from .holdings import Slots
from .source import belongs_to_user

GlobalRead: TypeAlias = tuple[Mapping[str, Any], str]
"""The attributes of a Python module, an object or a class, and the name of one, be it there or not."""
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


class GlobalReads:
    """What code reads that has run, and what the functions of the user read that it names.

    Args:
        codes: that has run, with its global variables.
        functions: that may have run too.
    """

    def __init__(self, codes: Mapping[CodeType, dict[str, Any]], functions: Iterable[FunctionType]) -> None:
        self._found: dict[tuple[int, str], GlobalRead] = {}
        # Kept while ids serve as keys: the attributes of a class are looked at through a new proxy each time.
        self._proxies: dict[type, MappingProxyType[str, Any]] = {}
        named = [*filter(_is_of_user, functions)]
        for code, held in codes.items():
            named += self._read_by(code, held)
        for code, held in {function.__code__: function.__globals__ for function in named}.items():
            if code not in codes:
                deque(self._read_by(code, held), 0)

    def __iter__(self) -> Iterator[GlobalRead]:
        return iter(self._found.values())

    def _read_by(self, code: CodeType, held: Mapping[str, Any]) -> Iterator[FunctionType]:
        """Notes what some code reads, and gives functions of the user among that."""
        for names in _chains(code):
            holders: list[Mapping[str, Any]] = [held]
            for name in names:
                place = next((place for place, holder in enumerate(holders) if name in holder), None)
                if place is None:
                    break
                value = holders[place][name]
                if _may_change(value):
                    self._found.update(((id(holder), name), (holder, name)) for holder in holders[: place + 1])
                if isinstance(value, FunctionType) and _is_of_user(value):
                    yield value
                holders = self._holders(value)

    def _holders(self, value: Any) -> list[Mapping[str, Any]]:
        """Where attributes of an object are looked up, in order."""
        own = getattr(value, "__dict__", None)
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        classes = [self._proxies.setdefault(kind, vars(kind)) for kind in kinds]
        slots = [] if isinstance(value, (type, ModuleType)) else Slots.of(value)
        return [*([own] if isinstance(own, dict) else []), *slots, *classes]


def _may_change(value: Any) -> bool:
    """False for what others than the user give a name for good."""
    if isinstance(value, (ModuleType, nn.Module, type)):
        return False
    return _is_of_user(value) if isinstance(value, FunctionType) else not callable(value)


def _is_of_user(function: FunctionType) -> bool:
    return belongs_to_user(function.__code__.co_filename)


def _chains(code: CodeType) -> Iterator[list[str]]:
    """Names of global variables, each with attributes that are read one of another."""
    names: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTE and names:
            names.append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            if names:
                yield names
            names = [instruction.argval] if instruction.opname == "LOAD_GLOBAL" else []
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _chains(inner)
