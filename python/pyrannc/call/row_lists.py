"""Which arguments are lists with an item for each row, and how they become tensors that all ranks form alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture import Structure, flatten
from pyrannc.capture.user.row_lists import RowList
from pyrannc.errors import InputError
from pyrannc.job import agree

_Name = str | int


@dataclass(frozen=True)
class _Opened:
    """The items of a list: the tensors of each, those of one that is like them, and their common structure."""

    items: list[list[Tensor]]
    first: list[Tensor]
    item: Structure
    kind: type

    @property
    def counts(self) -> list[int]:
        """The most elements of each tensor of an item."""
        return [max(tensor.numel() for tensor in own) for own in zip(*self.items, strict=True)]

    @property
    def like(self) -> Any:
        """An item like the others, without elements."""
        return self.item.rebuild([torch.empty([0] * t.dim(), dtype=t.dtype, device="cpu") for t in self.first])


class RowLists:
    """Knows for the calls of one model how long the tensors are that lists are packed into; they never get shorter."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[_Name, int], int] = {}

    def packed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with :class:`RowList` for lists of rows; all ranks call it.

        A list of dicts of tensors has an item for each row where the first tensor beside has as many rows, or there is
        none; so have lists of tensors that are as long, if there is none.

        Raises:
            InputError: the items of a list are not alike.
        """
        by_name: dict[_Name, Any] = dict(enumerate(args))
        by_name.update(kwargs)
        if not any(type(item) in (list, tuple) for item in by_name.values()):
            return args, kwargs
        found = _lists_of_rows(by_name)
        opened = agree.together(lambda: {name: _open(name, item) for name, item in found.items()})
        opened |= self._agree_on_lengths(opened, by_name, device)
        lists = {name: self._pack(name, item) for name, item in opened.items()}
        new_args = tuple(lists.get(place, item) for place, item in enumerate(args))
        return new_args, {name: lists.get(name, item) for name, item in kwargs.items()}

    def _agree_on_lengths(
        self, opened: Mapping[_Name, _Opened], by_name: Mapping[_Name, Any], device: torch.device
    ) -> dict[_Name, _Opened]:
        """Hears how long others' tensors are; returns this rank's lists without items, which others know."""
        empty: dict[_Name, _Opened] = {}
        for others in agree.gather_objects({name: (item.counts, item.like) for name, item in opened.items()}):
            for name, (counts, like) in others.items():
                for place, count in enumerate(counts):
                    # Few lengths are few captures.
                    length = 1 << max(0, count - 1).bit_length()
                    self._lengths[name, place] = max(self._lengths.get((name, place), 1), length)
                here = by_name.get(name)
                if type(here) in (list, tuple) and not here:
                    tensors, structure = flatten(like)
                    empty[name] = _Opened([], [tensor.to(device) for tensor in tensors], structure, type(here))
        return empty

    def _pack(self, name: _Name, opened: _Opened) -> RowList:
        lengths = [self._lengths[name, place] for place in range(opened.item.leaf_count)]
        return RowList.packed(opened.items, opened.first, lengths, opened.item, opened.kind)


def _lists_of_rows(by_name: Mapping[_Name, Any]) -> dict[_Name, Sequence[Any]]:
    lists = {name: item for name, item in by_name.items() if type(item) in (list, tuple) and item}
    dicts = {name: item for name, item in lists.items() if all(map(_is_dict_of_tensors, item))}
    beside = [tensor for name, item in by_name.items() if name not in lists for tensor in flatten(item)[0]]
    rows = next((tensor.shape[0] for tensor in beside if tensor.dim()), None)
    found = {name: item for name, item in dicts.items() if rows in (None, len(item))}
    if rows is not None or not found:
        return found
    lengths = set(map(len, found.values()))
    alike = {name: item for name, item in lists.items() if all(isinstance(i, Tensor) for i in item)}
    return found | {name: item for name, item in alike.items() if len(item) in lengths}


def _is_dict_of_tensors(item: Any) -> bool:
    return isinstance(item, dict) and any(isinstance(value, Tensor) for value in item.values())


def _open(name: _Name, items: Sequence[Any]) -> _Opened:
    opened = [flatten(item) for item in items]
    tensors, structure = opened[0]
    for place, (own, other) in enumerate(opened):
        if other != structure:
            raise InputError(
                f"argument {name!r} is a list with an item for each row, and item {place} has other keys or other "
                "Python values than the first: give all the same keys, and tensors for what differs from row to row"
            )
        for one, first in zip(own, tensors, strict=True):
            if (one.dtype, one.dim(), one.requires_grad) != (first.dtype, first.dim(), False):
                raise InputError(
                    f"argument {name!r} is a list with an item for each row, and a tensor of item {place} is of "
                    "another type or has other dimensions than the first item's, or requires a gradient"
                )
    return _Opened([own for own, _ in opened], tensors, structure, type(items))
