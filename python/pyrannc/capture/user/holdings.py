"""What Python objects hold, however deep, in a form that differs once something has been kept there."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from pyrannc.capture.torch_internals.tensors import version

from .bound import bound_to
from .kinds import is_of, is_of_numpy
from .source import PACKAGES, belongs_to_user

_MOST = 300_000
SCALARS = (*weakref.ProxyTypes, type(None), bool, int, float, complex, str, bytes)
"""Proxies are no more looked into: they answer as what they stand for, or raise where that is no more."""
_NO_SLOTS = ("__dict__", "__weakref__")
LRU_CACHE = type(functools.lru_cache(lambda: None))
_RECORDS = frozenset({"argparse", "collections", "configparser", "types"})
"""Modules of the standard library whose objects hold what the user has put there, as namespaces do."""
_WORKERS = (Tensor, nn.Module, ModuleType, FunctionType, Generator, Optimizer, LRScheduler, DataLoader)
"""What changes by itself, or is looked after elsewhere."""


def is_array(value: Any) -> bool:
    """True for an array of NumPy that has numbers."""
    return is_of_numpy(value, "ndarray") and value.dtype.kind in "biufc"


class TooMuchError(Exception):
    """There is more to look at than is worth the time."""


class Holdings:
    """What some objects can reach through containers, closures, and objects and functions of the user.

    Args:
        roots: the objects.
        watched: modules whose attributes somebody else watches.

    Attributes:
        of: for each root, what it reaches that those before it do not.

    Raises:
        TooMuchError: they reach too much.
    """

    def __init__(self, roots: list[Any], watched: Set[int]) -> None:
        self._watched = watched
        # Kept, so that an id names one object.
        self._seen: dict[int, Any] = {}
        self.of = [list(self._walk(root)) for root in roots]

    def _walk(self, root: Any) -> Iterator[Any]:
        stack = [root]
        while stack:
            value = stack.pop()
            if is_of(value, SCALARS):
                yield value
                continue
            # A bound method is a new object each time.
            yield type(value) if isinstance(value, MethodType) else id(value)
            if id(value) in self._seen:
                continue
            if len(self._seen) == _MOST:
                raise TooMuchError
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                yield 0 if value.is_inference() else version(value)
            elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
                yield value.tobytes()
            elif id(value) not in self._watched:
                inside = _inside(value)
                yield len(inside)
                stack += inside


def _inside(value: Any) -> list[Any]:
    if isinstance(value, ModuleType):
        return []
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, LRU_CACHE):
        return [value.__wrapped__]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if type(value).__module__ == "itertools":
        return [repr(value)]
    if isinstance(value, type):
        return [*value.__bases__, *map(_held, vars(value).values())] if is_own(_file(value)) else []
    if isinstance(value, nn.Module) or belongs_to_user(_file(type(value))):
        slots = [name for kind in type(value).__mro__ for name, _ in slots_of(kind)]
        own = [getattr(value, name) for name in slots if hasattr(value, name)]
        return [type(value), *getattr(value, "__dict__", {}).values(), *own]
    return [bound_to(value)]


def slots_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Names of the slots that a class adds, as it holds them, and what reads and sets them."""
    names = vars(kind).get("__slots__", ())
    for name in (names,) if isinstance(names, str) else names:
        if name in _NO_SLOTS:
            continue
        is_private = name.startswith("__") and not name.endswith("__")
        held = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
        if hasattr(vars(kind).get(held), "__set__"):
            yield held, vars(kind)[held]


def users_slots(kind: type, *, of_packages: bool = False) -> dict[str, Any]:
    """What reads and sets the slots of a class and its bases that are the user's; of equal names that of the first.

    Args:
        of_packages: those of bases from packages, too, but for torch and the standard library.
    """
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base) and (is_users_own(base) or (of_packages and belongs_to_user(_file(base)))):
            for name, slot in slots_of(base):
                found.setdefault(name, slot)
    return found


class Slots(Mapping[str, Any]):
    """The attributes that an object has in slots; those of packages' own classes are for these to keep."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        slots = users_slots(type(owner), of_packages=is_users_own(type(owner)))
        self._slots = {name: slot for name, slot in slots.items() if not name.startswith("__")}

    @staticmethod
    def of(owner: Any) -> list[Slots]:
        """One, or none where its class has no slots."""
        found = Slots(owner)
        return [found] if found._slots else []

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._owner, type(self._owner))
        except Exception:  # nothing is there, or what stands in the slot's place says so in its own way
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _held(item: Any) -> Any:
    """What stands for an attribute of a class."""
    if isinstance(item, (staticmethod, classmethod)):
        return item.__func__
    if isinstance(item, property):
        return item.fget
    return None if inspect.isdatadescriptor(item) or inspect.isgetsetdescriptor(item) else item


def _file(kind: type) -> str:
    """Where a class stands; what is typed in belongs to the user."""
    module = sys.modules.get(kind.__module__)
    return "typed in" if kind.__module__ == "__main__" else getattr(module, "__file__", None) or "<built in>"


def is_users_own(kind: type) -> bool:
    """True for a class from the user's own source files."""
    return is_own(_file(kind))


def is_record(value: Any) -> bool:
    """True for objects such as a configuration, whose attributes are what somebody has put there.

    Objects of torch are none, nor those of the standard library that do something, such as loggers.
    """
    kind = type(value)
    if isinstance(value, (type, *_WORKERS)) or not (
        isinstance(getattr(value, "__dict__", None), dict) or Slots.of(value)
    ):
        return False
    if is_users_own(kind):
        return True
    package = str(kind.__module__).partition(".")[0]
    is_others = package in ("torch", __name__.partition(".")[0]) or package in sys.stdlib_module_names - _RECORDS
    return not (callable(value) or is_others)


def is_own(file: str | None) -> bool:
    """True for the user's own source files, not those of packages: these name each other without end."""
    return file is not None and belongs_to_user(file) and PACKAGES not in file


def _of_function(function: FunctionType) -> list[Any]:
    cells = cells_of(function)
    if not is_own(function.__code__.co_filename):
        return cells
    names = set(names_in(function.__code__))
    found = [value for name, value in function.__globals__.items() if name in names]
    modules = [item for item in found if isinstance(item, ModuleType) and is_own(getattr(item, "__file__", None))]
    # Of modules, what the function names.
    found += [value for module in modules for name, value in vars(module).items() if name in names]
    rest = [function.__defaults__, function.__kwdefaults__, function.__dict__]
    return [*cells, *rest, *(item for item in found if not isinstance(item, ModuleType))]


def names_in(code: CodeType) -> Iterator[str]:
    """Global variables and attributes that code names, with that of functions made in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def cells_of(function: FunctionType) -> list[Any]:
    """What a function has from the function that it is made in."""
    return [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]


def is_filled(cell: Any) -> bool:
    """True for a variable of an outer function that has a value."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
