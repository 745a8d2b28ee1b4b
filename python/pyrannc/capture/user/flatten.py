"""Any Python structure as a list of tensors and a recipe to build it again.

Containers, types registered with ``torch.utils._pytree``, dataclasses and plain objects that hold
tensors are opened; everything else is a constant of the structure.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tensors import pytree

from .absent import Absent
from .containers import content, fill
from .members import fill_members, has_members, members, twin


@dataclasses.dataclass(frozen=True)
class Structure:
    """A structure without its tensors. Equal structures have equal keys and children."""

    key: Hashable
    children: tuple[Structure, ...] = ()
    make: Callable[[list[Any]], Any] = dataclasses.field(default=list, compare=False, repr=False)

    @cached_property
    def leaf_count(self) -> int:
        """How many tensors it has."""
        return 1 if self.key == _TENSOR_KEY else sum(child.leaf_count for child in self.children)

    def constants(self) -> Iterator[Any]:
        """The Python values in it that are hashable."""
        if isinstance(self.key, tuple) and len(self.key) == 2 and not self.children:
            yield self.key[1]
        for child in self.children:
            yield from child.constants()

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The structure again, with ``leaves`` (in flattening order) as its tensors.

        Raises:
            ValueError: the number of leaves is not the number of tensors of the structure.
        """
        rest = iter(leaves)
        try:
            built = self._rebuild(rest)
        except StopIteration:
            raise ValueError(f"too few tensors for the structure: {len(leaves)}") from None
        if next(rest, None) is not None:
            raise ValueError(f"too many tensors for the structure: {len(leaves)}")
        return built

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        if self.key == _TENSOR_KEY:
            return next(leaves)
        # A list, not a generator: StopIteration of the leaves must not end it silently.
        return self.make([child._rebuild(leaves) for child in self.children])


_TENSOR_KEY = ("tensor",)
_TENSOR = Structure(_TENSOR_KEY)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type)


def flatten(structure: Any) -> tuple[list[Tensor], Structure]:
    """The tensors of ``structure``, depth first, and the structure without them."""
    leaves: list[Tensor] = []
    return leaves, _open(structure, leaves, _Walk())


def batch_rows(tensors: Sequence[Tensor]) -> int:
    """The batch size of a call: dimension 0 of its first tensor that has dimensions.

    Raises:
        ValueError: no tensor has a dimension.
    """
    for tensor in tensors:
        if tensor.dim() >= 1:
            return int(tensor.shape[0])
    raise ValueError("the batch size cannot be told: no argument is a tensor with at least one dimension")


def by_extents(tensors: Sequence[Tensor], rows: int) -> tuple[int, ...]:
    """1 for tensors with ``rows`` as dimension 0, which may have the rows of the batch; 0 for others."""
    return tuple(int(tensor.dim() > 0 and tensor.shape[0] == rows) for tensor in tensors)


@dataclasses.dataclass
class _Walk:
    """Objects on the way to where a walk is, and those without a tensor in them, kept so that their ids stay theirs."""

    path: set[int] = dataclasses.field(default_factory=set)
    barren: dict[int, Any] = dataclasses.field(default_factory=dict)


def _open(item: Any, leaves: list[Tensor], walk: _Walk) -> Structure:
    if isinstance(item, Tensor):
        leaves.append(item)
        return _TENSOR
    if isinstance(item, _SCALARS):
        return Structure((type(item), item), make=lambda _: item)
    if isinstance(item, Absent):
        return Structure((type(item), str(item)), make=lambda _: item)
    if isinstance(item, SYMBOLIC) or id(item) in walk.path or id(item) in walk.barren:
        return _constant(item)
    walk.path.add(id(item))
    try:
        return _open_container(item, leaves, walk)
    finally:
        walk.path.discard(id(item))


def _open_container(item: Any, leaves: list[Tensor], walk: _Walk) -> Structure:
    kind: Any = type(item)
    if kind in (list, tuple):
        return Structure(kind, tuple(_open(child, leaves, walk) for child in item), kind)
    if kind in (dict, OrderedDict):
        keys = tuple(item)
        children = tuple(_open(child, leaves, walk) for child in item.values())
        return Structure((kind, keys), children, lambda made: kind(zip(keys, made, strict=True)))
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        parts, context = node.flatten_fn(item)
        children = tuple(_open(child, leaves, walk) for child in parts)
        return Structure((kind, _frozen(context)), children, lambda made: node.unflatten_fn(made, context))
    if pytree.is_namedtuple_instance(item):
        return Structure(kind, tuple(_open(child, leaves, walk) for child in item), lambda made: kind(*made))
    if isinstance(item, (dict, list)):
        return _open_own_container(item, leaves, walk)
    return _open_object(item, leaves, walk) if has_members(item) else _constant(item)


def _open_own_container(item: Any, leaves: list[Tensor], walk: _Walk) -> Structure:
    """Opens a dict or a list of a class of its own, which may have attributes beside its items."""
    held, attributes = content(item), members(item)
    items = held if isinstance(held, dict) else dict(enumerate(held))
    keys, names = tuple(items), tuple(attributes)
    children = tuple(_open(child, leaves, walk) for child in (*items.values(), *attributes.values()))
    kind: Any = type(item)
    template = None if isinstance(item, dict) else twin(item)
    if template is not None:
        fill(template, ())

    def make(made: list[Any]) -> Any:
        own, rest = made[: len(items)], made[len(items) :]
        if template is None:
            # A Counter would count pairs.
            built = kind(dict(zip(keys, own, strict=True)))
        else:
            built = twin(template)
            fill(built, own)
        fill_members(built, dict(zip(names, rest, strict=True)))
        return built

    return Structure((kind, keys, names), children, make)


def _open_object(item: Any, leaves: list[Tensor], walk: _Walk) -> Structure:
    """Opens the attributes of an object, if there is a tensor somewhere in them, or it has nothing else."""
    attributes = members(item)
    names = tuple(attributes)
    found: list[Tensor] = []
    children = tuple(_open(child, found, walk) for child in attributes.values())
    if not found and type(item) is not SimpleNamespace and not dataclasses.is_dataclass(item):
        walk.barren[id(item)] = item
        # It may hold something else at the next call, but for a value, as a path is.
        by_value: Any = type(item).__hash__
        is_value = not hasattr(item, "__dict__") and by_value not in (None, object.__hash__)
        return _constant(item) if is_value else Structure((_constant(item).key, names), children, lambda _: item)
    leaves.extend(found)
    template = twin(item)
    fill_members(template, dict.fromkeys(names))

    def make(made: list[Any]) -> Any:
        built = twin(template)
        fill_members(built, dict(zip(names, made, strict=True)))
        return built

    return Structure((type(item), names), children, make)


def _constant(item: Any) -> Structure:
    try:
        hash(item)
        key: Hashable = item
    except TypeError:
        key = id(item), _contents(item)
    return Structure((type(item), key), make=lambda _: item)


def _contents(item: Any) -> Hashable:
    """What of an object shows that it has been changed in place, if anything does."""
    if isinstance(item, set):
        return frozenset(item)
    if isinstance(item, bytearray):
        return bytes(item)
    return item.tobytes() if type(item).__module__ == "numpy" and hasattr(item, "tobytes") else None


def _frozen(context: Any) -> Hashable:
    """A hashable stand-in for a pytree context."""
    if isinstance(context, (list, tuple)):
        return tuple(_frozen(part) for part in context)
    if isinstance(context, dict):
        return tuple((key, _frozen(part)) for key, part in context.items())
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return context  # type: ignore[no-any-return]  # hash() above proved it
