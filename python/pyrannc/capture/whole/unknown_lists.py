"""Lists that a part which stays whole returns with an item for each row, as the attention weights of each image.

A Graph has as many Values for any number of rows, so such a list cannot leave the part. Where the model makes nothing
of it, what stands in its place does no harm; any use of that ends the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.user.absent import Absent
from pyrannc.capture.user.flatten import Structure


class UnknownList(Absent):
    """What stands in the place of such a list, and passes for one until it is used."""

    def __init__(self, error: UntraceableError) -> None:
        super().__init__(str(error))
        self._error = error

    @property  # type: ignore[misc]  # code that asks what it has is told of a list
    def __class__(self) -> type:
        return list

    def error(self) -> UntraceableError:
        """What any use of it raises."""
        return self._error


def shared_structure(structures: Iterable[Structure], error: UntraceableError) -> Structure | None:
    """What the structures of several batches have in common; None if they differ in more than the lengths of lists.

    Args:
        structures: at least one.
        error: what the use of a list of unknown length raises.
    """
    shared, *others = structures
    for other in others:
        found = _shared(shared, other, error)
        if found is None:
            return None
        shared = found
    return shared


def _shared(one: Structure, other: Structure, error: UntraceableError) -> Structure | None:
    if _is_unknown(one):
        return one if other.key is list else None
    if one.key != other.key:
        return None
    if len(one.children) != len(other.children):
        return Structure((UnknownList, str(error)), make=lambda _: UnknownList(error)) if one.key is list else None
    children = [_shared(mine, theirs, error) for mine, theirs in zip(one.children, other.children, strict=True)]
    found = tuple(child for child in children if child is not None)
    return Structure(one.key, found, one.make) if len(found) == len(children) else None


def without_unknown(leaves: Sequence[Tensor], structure: Structure, shared: Structure) -> list[Tensor] | None:
    """The tensors of a structure that are in what it shares with others; None if it does not share that."""
    if _is_unknown(shared):
        return [] if structure.key is list else None
    if structure.key != shared.key or len(structure.children) != len(shared.children):
        return None
    if not structure.children:
        return list(leaves)
    found: list[Tensor] = []
    for own, other in zip(structure.children, shared.children, strict=True):
        kept = without_unknown(leaves[: own.leaf_count], own, other)
        if kept is None:
            return None
        found += kept
        leaves = leaves[own.leaf_count :]
    return found


def refuse_unknown_lists(structure: Structure) -> None:
    """Raises UntraceableError where one of them is in a structure."""
    if _is_unknown(structure):
        raise structure.rebuild(()).error()
    for child in structure.children:
        refuse_unknown_lists(child)


def has_lists(structure: Structure) -> bool:
    """True where a list is in a structure."""
    return structure.key is list or any(map(has_lists, structure.children))


def _is_unknown(structure: Structure) -> bool:
    return isinstance(structure.key, tuple) and structure.key[0] is UnknownList
