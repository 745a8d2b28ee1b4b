"""Global variables that code of the user reads, and attributes of the objects that stand in them."""

from __future__ import annotations

import dis
import functools
import importlib.util
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from pyrannc.capture.user.holdings import LRU_CACHE, SCALARS, Slots, cells_of, is_own, is_record, is_users_own
from pyrannc.capture.user.kinds import is_of
from pyrannc.capture.user.references import REFERENCES, referent
from pyrannc.capture.user.source import belongs_to_user

GlobalRead: TypeAlias = tuple[Mapping[str, Any], str]
"""The attributes of a Python module, an object or a class, and the name of one, be it there or not."""
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_WHOLE = ("vars", "asdict", "astuple", "__dict__")
"""Names of what takes all attributes of an object."""
_OF_OWNER = (FunctionType, property, classmethod, staticmethod, functools.cached_property)
"""What reads the object that it is an attribute of."""
_MAKING = ("__new__", "__init__", "__post_init__")
_MOST_VALUES = 5000
_MOST_ITEMS = 4096


class GlobalReads:
    """What code reads that has run, and what the functions of the user may read that it names or is given by globals.

    Where it hands a global value on, or calls it, others read that. Of such values, and of what they hold, they read
    what has the name of an attribute in any of the code: a script counts its steps in the same objects.

    Args:
        codes: that has run, with its global variables.
        functions: that may have run too.
        handed_on: further values that some of that code may have.
    """

    def __init__(
        self,
        codes: Mapping[CodeType, dict[str, Any]],
        functions: Iterable[FunctionType],
        handed_on: Iterable[Any] = (),
    ) -> None:
        self._found: dict[tuple[int, str], GlobalRead] = {}
        # Kept while ids serve as keys: the attributes of a class are looked at through a new proxy each time.
        self._proxies: dict[type, MappingProxyType[str, Any]] = {}
        self._holders_of: dict[int, tuple[Any, list[Mapping[str, Any]]]] = {}
        self._handed_on = {id(value): value for value in handed_on}
        self._names: set[str] = set()
        self._called: set[str] = set()
        self._texts: set[str] = set()
        self._takes_all = False
        self._follow(codes, [*filter(_is_of_user, functions)])

    def __iter__(self) -> Iterator[GlobalRead]:
        return iter(self._found.values())

    def _follow(self, codes: Mapping[CodeType, dict[str, Any]], named: list[FunctionType]) -> None:
        """Reads code and what it names; of packages, what has run names, but nothing beyond."""
        read: set[CodeType] = set()
        new: Mapping[CodeType, dict[str, Any]] = codes
        while new or named:
            for code, held in new.items():
                found = [*self._read_by(code, held)]
                named += found if code in codes or is_own(code.co_filename) else []
            read.update(new)
            named += self._functions_handed_on()
            new = {function.__code__: function.__globals__ for function in named if function.__code__ not in read}
            named = []

    def _read_by(self, code: CodeType, held: Mapping[str, Any]) -> Iterator[FunctionType]:
        """Notes what some code reads, and gives functions of the user among that."""
        scan = _scan(code)
        is_users = is_own(code.co_filename)
        self._names |= scan.names
        self._called |= scan.called
        for names in scan.chains:
            yield from self._read_chain(held, names, is_users)
        if is_users:
            self._texts |= scan.texts
            self._takes_all |= any(not is_of(held.get(name), ModuleType) for name in scan.takes_all_of)
            for module, from_it in _imported(scan, held):
                self._hand_on([] if from_it else [module])
                for imported in from_it:
                    yield from self._read_chain(vars(module), [imported], is_users)

    def _read_chain(self, held: Mapping[str, Any], names: list[str], is_users: bool) -> Iterator[FunctionType]:
        """Likewise for a variable and attributes one of another."""
        holders, values = [held], list[Any]()
        for name in names:
            found = self._look_up(holders, name, is_users and (not values or _is_users(values[-1])))
            if not found:
                break
            values += found
            if is_of(values[-1], FunctionType) and _is_of_user(values[-1]):
                yield values[-1]
            holders = self._holders(values[-1])
        if is_users:
            self._hand_on(values)

    def _look_up(self, holders: list[Mapping[str, Any]], name: str, is_users: bool) -> list[Any]:
        """What stands under a name, if anything does; notes that unless others than the user gave it for good."""
        place = next((place for place, holder in enumerate(holders) if name in holder), None)
        if place is None:
            return []
        value = holders[place][name]
        if _may_change(value) or (is_users and place == 0 and not is_of(value, ModuleType)):
            self._note(holders[: place + 1], name)
        return [value]

    def _note(self, holders: Iterable[Mapping[str, Any]], name: str) -> None:
        self._found.update(((id(holder), name), (holder, name)) for holder in holders)

    def _hand_on(self, values: list[Any]) -> None:
        """Takes the last one for read by others, and its owner if it reads that."""
        takes_owner = len(values) > 1 and is_of(values[-1], _OF_OWNER) and not is_of(values[-2], ModuleType)
        self._handed_on.update((id(value), value) for value in values[-2 if takes_owner else -1 :])

    def _functions_handed_on(self) -> Iterator[FunctionType]:
        """Notes what values that are handed on have under names in the code, and gives functions of the user there."""
        waiting, seen = deque(self._handed_on.values()), set[int]()
        while waiting and len(seen) < _MOST_VALUES:
            value = waiting.popleft()
            value = referent(value) if is_of(value, REFERENCES) else value
            if is_of(value, SCALARS) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, FunctionType) and _is_of_user(value):
                yield value
            waiting += self._inside(value)

    def _inside(self, value: Any) -> Iterable[Any]:
        if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            held = value.values() if isinstance(value, dict) else value
            return held if len(value) <= _MOST_ITEMS else []
        if isinstance(value, functools.partial):
            for name in value.keywords:
                self._note([value.keywords], name)
            return value.func, value.args, value.keywords
        if isinstance(value, FunctionType):
            return _of_function(value) if is_own(value.__code__.co_filename) else []
        return self._named_in(value) if _is_users(value) else _behind(value)

    def _named_in(self, value: Any) -> list[Any]:
        """Notes what an object, a class or a Python module has under names in the code, and gives that."""
        holders = self._holders(value)
        own = [holder for holder in holders if not isinstance(holder, MappingProxyType)]
        names = self._names.intersection(chain.from_iterable(holders))
        names.update(name for holder in holders for name in self._called.intersection(holder) if callable(holder[name]))
        if not isinstance(value, (ModuleType, type)) and (self._takes_all or _finds_by_itself(value)):
            names.update(name for holder in own for name, item in holder.items() if _is_setting(item))
        may_get_more = [holder for holder in own if isinstance(holder, dict)]
        for name in self._texts.difference(chain.from_iterable(holders)):
            self._note(may_get_more, name)
        found = [self._look_up(holders, name, True) for name in names if not name.startswith("__")]
        return [*chain.from_iterable(found), *self._implicit(value)]

    def _implicit(self, value: Any) -> list[FunctionType]:
        """Methods of the user's classes that run though no code names them."""
        kinds = [] if isinstance(value, ModuleType) else filter(is_users_own, _kinds(value))
        methods = [method for kind in kinds for method in vars(kind).items() if is_of(method[1], FunctionType)]
        others = () if isinstance(value, type) else _MAKING
        return [method for name, method in methods if name.startswith("__") and name not in others]

    def _holders(self, value: Any) -> list[Mapping[str, Any]]:
        """Where attributes of an object are looked up, in order."""
        if id(value) not in self._holders_of:
            own = _own(value)
            classes = [self._proxies.setdefault(kind, vars(kind)) for kind in _kinds(value)]
            slots = [] if is_of(value, (type, ModuleType)) else Slots.of(value)
            self._holders_of[id(value)] = value, [*([own] if isinstance(own, dict) else []), *slots, *classes]
        return self._holders_of[id(value)][1]


def _own(value: Any) -> Any:
    """The dictionary of an object, or of what a proxy stands for, if that is still there."""
    try:
        return getattr(value, "__dict__", None)
    except ReferenceError:
        return None


def _kinds(value: Any) -> tuple[type, ...]:
    return value.__mro__ if is_of(value, type) else type(value).__mro__


def _may_change(value: Any) -> bool:
    """False for what others than the user give a name for good."""
    if is_of(value, (ModuleType, nn.Module, type)):
        return False
    if is_of(value, FunctionType):
        return _is_of_user(value)
    return not callable(value) or is_of(value, functools.partial) or is_users_own(type(value))


def _is_of_user(function: FunctionType) -> bool:
    return belongs_to_user(function.__code__.co_filename)


def _is_users(value: Any) -> bool:
    """True for what has attributes that somebody has put there: the user's Python modules and classes, and objects."""
    if isinstance(value, ModuleType):
        return is_own(getattr(value, "__file__", None))
    return is_users_own(value) if isinstance(value, type) else is_record(value)


def _finds_by_itself(value: Any) -> bool:
    """True for an object of a package that gives attributes by other names than it has them."""
    return hasattr(type(value), "__getattr__") and not is_users_own(type(value))


def _is_setting(value: Any) -> bool:
    """True for what is no record of what has happened, as a list may be."""
    is_fixed = all(map(_is_setting, value)) if is_of(value, tuple) else is_of(value, SCALARS)
    return is_fixed or isinstance(value, dict) or is_record(value)


def _of_function(function: FunctionType) -> list[Any]:
    """What a function has besides globals."""
    return [function.__defaults__, function.__kwdefaults__, *cells_of(function)]


def _behind(value: Any) -> list[Any]:
    """What runs in the place of a callable."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, (classmethod, staticmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, functools.cached_property):
        return [value.func]
    return [value.__wrapped__] if isinstance(value, LRU_CACHE) else []


class _Scan(NamedTuple):
    """What some code names.

    Attributes:
        chains: global variables, each with attributes that are read one of another.
        imports: level, name of the Python module, and names in it.
        names: attributes, and texts that may be names of some.
        called: attributes that are called.
        texts: among the names.
        takes_all_of: global variables of which it takes attributes whose names do not stand in it; "" is another value.
    """

    chains: tuple[list[str], ...]
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    names: frozenset[str]
    called: frozenset[str]
    texts: frozenset[str]
    takes_all_of: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _scan(code: CodeType) -> _Scan:
    instructions = [item for item in dis.get_instructions(code) if item.opname != "EXTENDED_ARG"]
    attributes = [item for item in instructions if item.opname in _ATTRIBUTE]
    called = frozenset(item.argval for item in attributes if _is_called(item))
    texts = frozenset(_texts(code.co_consts))
    names = texts.union(item.argval for item in attributes if not _is_called(item))
    takes = frozenset(_takes_all_of(instructions))
    own = _Scan(tuple(_chains(instructions)), tuple(_imports(instructions)), names, called, texts, takes)
    inner = [_scan(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    chains, imports, *sets = zip(own, *inner, strict=True)
    return _Scan(sum(chains, ()), sum(imports, ()), *(frozenset().union(*found) for found in sets))


def _is_called(instruction: dis.Instruction) -> bool:
    """True for an attribute that is taken to be called."""
    if instruction.opname == "LOAD_METHOD":
        return True
    return sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _chains(instructions: list[dis.Instruction]) -> Iterator[list[str]]:
    names: list[str] = []
    for instruction in instructions:
        if instruction.opname in _ATTRIBUTE and names:
            names.append(instruction.argval)
        else:
            if names:
                yield names
            names = [instruction.argval] if instruction.opname == "LOAD_GLOBAL" else []


def _imports(instructions: list[dis.Instruction]) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    for place, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            level, names = (before.argval for before in instructions[place - 2 : place])
            yield level, instruction.argval, names or ()


def _imported(scan: _Scan, held: Mapping[str, Any]) -> Iterator[tuple[ModuleType, tuple[str, ...]]]:
    """The user's Python modules that code imports, with names of what it imports from them."""
    for level, name, names in scan.imports:
        try:
            full = importlib.util.resolve_name("." * level + name, held.get("__package__"))
        except ImportError:  # there is no such package, so that this has not run
            continue
        for found in [full] if names else {full, full.partition(".")[0]}:
            module = sys.modules.get(found)
            if isinstance(module, ModuleType) and _is_users(module):
                yield module, names


def _takes_all_of(instructions: list[dis.Instruction]) -> Iterator[str]:
    for place, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_GLOBAL", *_ATTRIBUTE) and instruction.argval in _WHOLE:
            yield ""
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "getattr":
            ends = (end for end in range(place, len(instructions)) if instructions[end].opname.startswith("CALL"))
            given = instructions[place + 1 : next(ends, place)]
            kind, name = _first_of(given)
            # A method that asks this of its own object is given the name where it is called.
            if not _has_name(given) and (kind, name) != ("LOAD_FAST", "self"):
                yield name if kind == "LOAD_GLOBAL" else ""


def _has_name(given: list[dis.Instruction]) -> bool:
    """True where the second of some arguments is the name of an attribute, written there; a third may follow."""
    rest = [item for item in given if item.opname not in ("PUSH_NULL", "PRECALL")]
    # Newer versions of Python take two variables at a time.
    if not rest or isinstance(rest.pop(0).argval, tuple):
        return False
    while rest and rest[0].opname in _ATTRIBUTE:
        rest.pop(0)
    if not rest or rest[0].opname != "LOAD_CONST" or not isinstance(rest[0].argval, str):
        return False
    is_given_as_it_is = all(item.opname not in _ATTRIBUTE for item in rest[1:2])
    return is_given_as_it_is and all(item.opname.startswith("LOAD_") for item in rest[1:])


def _first_of(given: list[dis.Instruction]) -> tuple[str, str]:
    """How the first of some arguments is taken, and its name, if it is a variable."""
    if not given or any(item.opname in _ATTRIBUTE for item in given[1:2]):
        return "", ""
    kind = next((kind for kind in ("LOAD_FAST", "LOAD_GLOBAL") if given[0].opname.startswith(kind)), "")
    name = given[0].argval
    # Newer versions of Python take two variables at a time.
    return kind, name[0] if isinstance(name, tuple) else name
