"""Which tensors of a call have the rows of the batch as dimension 0: told by the user, or proven.

An extent that equals the number of rows proves nothing. A tensor has rows if ranks with other batches bring others,
or if the model does not run when only the other tensors have them.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.call.equal import digest, names_inside
from pyrannc.call.lists_of_rows import ADVICE, refuse_lists_of_rows
from pyrannc.capture import Structure, batch_rows, by_extents, flatten, may_lack_rows
from pyrannc.capture.row_lists import RowList
from pyrannc.errors import InputError, MismatchError
from pyrannc.job import agree, process

BatchNames = Sequence[str | int]
"""Names, or positions, of arguments of the model's forward."""
HasRows = tuple[bool, ...]
"""For each tensor of the arguments, whether it has rows."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, opened.

    Attributes:
        tensors: all of them.
        structure: the arguments without them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    structure: Structure

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Opens them."""
        return Arguments(args, kwargs, *flatten((args, kwargs)))

    @cached_property
    def names(self) -> list[str]:
        """Of each tensor, for messages."""
        positional, by_name = self.counts
        named = [
            (str(place), item, count) for place, (item, count) in enumerate(zip(self.args, positional, strict=True))
        ]
        named += [(f'"{key}"', item, count) for (key, item), count in zip(self.kwargs.items(), by_name, strict=True)]
        return [name for place, item, count in named for name in _names(place, item, count)]

    @cached_property
    def in_row_lists(self) -> tuple[bool, ...]:
        """Of each tensor, whether it stands for a list with an item for each row."""
        lists = [item for item in (*self.args, *self.kwargs.values()) if isinstance(item, RowList)]
        places = {id(tensor) for rows in lists for tensor in rows.tensors}
        return tuple(id(tensor) in places for tensor in self.tensors)

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        """How many tensors are in each argument: those by position, and those by name."""
        positional, by_name = self.structure.children
        return [child.leaf_count for child in positional.children], [child.leaf_count for child in by_name.children]

    @property
    def key(self) -> Hashable:
        """What calls share whose tensors have rows alike."""
        return self.structure, tuple(tensor.dim() for tensor in self.tensors)


def _names(place: str, item: Any, count: int) -> list[str]:
    inside = [] if isinstance(item, RowList) else list(names_inside(place, item))
    return inside if len(inside) == count else [place] * count


class BatchArguments:
    """Knows for the calls of one model which tensors have rows.

    Args:
        model: the user's.
        named: the arguments that have rows; ``None`` where that is to be found out.
        gather_inputs: the rows of all ranks count, instead of those of rank 0 alone.

    Raises:
        InputError: the model's forward has no such argument.
    """

    def __init__(self, model: nn.Module, named: BatchNames | None, *, gather_inputs: bool) -> None:
        self._model = model
        self._named = named
        self._gather_inputs = gather_inputs
        self._found: dict[Hashable, HasRows] = {}
        self._positions = _positions(model)
        if named is not None:
            self._check_names(named)

    def _check_names(self, named: BatchNames) -> None:
        parameters = inspect.signature(self._model.forward).parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = [parameter.name for parameter in parameters]
        for name in named:
            if isinstance(name, str) and name not in known:
                raise InputError(f'batch_arguments has "{name}", but the arguments of forward are {", ".join(known)}')

    def known(self, call: Arguments) -> HasRows | None:
        """Which tensors have rows, if this is known without the other ranks."""
        return self._found.get(call.key) if self._named is None else self._as_named(call, self._named)

    def _as_named(self, call: Arguments, named: BatchNames) -> HasRows:
        marked: list[bool] = []
        positional, by_name = call.counts
        for place, count in enumerate(positional):
            name = self._positions[place] if place < len(self._positions) else None
            marked += [place in named or name in named] * count
        for key, count in zip(call.kwargs, by_name, strict=True):
            position = self._positions.index(key) if key in self._positions else None
            marked += [key in named or position in named] * count
        marked = [mark or is_list for mark, is_list in zip(marked, call.in_row_lists, strict=True)]
        return tuple(mark and tensor.dim() > 0 for mark, tensor in zip(marked, call.tensors, strict=True))

    def rows(self, call: Arguments, has_rows: HasRows | None) -> int:
        """The rows of this rank's batch.

        Raises:
            InputError: no tensor has rows, or they have different numbers of them.
        """
        if has_rows is None:
            try:
                rows = batch_rows(call.tensors)
            except ValueError as error:
                raise InputError(str(error)) from None
            refuse_lists_of_rows(call.args, call.kwargs, call.tensors, rows)
            return rows
        batched = [place for place, marked in enumerate(has_rows) if marked]
        if not batched:
            raise InputError("the batch size cannot be told: no argument in batch_arguments is a tensor with rows")
        extents = [int(call.tensors[place].shape[0]) for place in batched]
        rows = extents[0]
        for place, extent in zip(batched, extents, strict=True):
            if extent != rows:
                raise InputError(
                    f"argument {call.names[place]} has {extent} rows where argument {call.names[batched[0]]} has "
                    f"{rows}; if not both have the rows of the batch, name those that do: "
                    "RaNNCModule(..., batch_arguments=[...])"
                )
        return rows

    def find(self, call: Arguments, rows: int, device: torch.device) -> HasRows:
        """Finds out which tensors have rows. All ranks call it.

        Raises:
            InputError: a tensor may have rows and may not.
            MismatchError: a tensor without rows has another value on another rank.
        """
        own = by_extents(call.tensors, rows)
        brought = [_brought(tensor) for tensor in call.tensors]
        everyone: list[tuple[HasRows, list[Hashable]]] = agree.gather_objects((own, brought))
        if len({len(brought) for _, brought in everyone}) > 1:
            raise MismatchError("the ranks pass different numbers of tensors")
        if not self._gather_inputs:
            everyone = everyone[:1]
        found = tuple(all(marks) for marks in zip(*(marks for marks, _ in everyone), strict=True))
        differs = [len(set(values)) > 1 for values in zip(*(values for _, values in everyone), strict=True)]
        for name, batched, other in zip(call.names, found, differs, strict=True):
            if other and not batched:
                raise MismatchError(
                    f"argument {name} has another value on one rank than on another; give all ranks the same one "
                    f"(what differs from row to row is a tensor with the batch as dimension 0){_of_list(name)}"
                )
        # A single one is the batch, for there has to be one.
        certain = [differ or is_list for differ, is_list in zip(differs, call.in_row_lists, strict=True)]
        open_places = [place for place, batched in enumerate(found) if batched and not certain[place]]
        open_places = open_places if sum(found) > 1 else []
        self._refuse_unproven(call, rows, device, found, open_places)
        self._found[call.key] = found
        return found

    def _refuse_unproven(
        self, call: Arguments, rows: int, device: torch.device, found: HasRows, places: Sequence[int]
    ) -> None:
        def unproven() -> int | None:
            if process.get_rank() != 0:
                return None
            runs = (
                place
                for place in places
                if may_lack_rows(
                    self._model, call.args, call.kwargs, device=device, rows=rows, has_rows=found, place=place
                )
            )
            return next(runs, None)

        place = agree.broadcast_object(agree.together(unproven)) if places else None
        if place is None:
            return
        shape = tuple(call.tensors[place].shape)
        same = " and is the same on all ranks" if process.get_world_size() > 1 and self._gather_inputs else ""
        raise InputError(
            f"argument {call.names[place]} (shape {shape}) has as many elements in dimension 0 as the batch has rows"
            f"{same}, but the model also runs with another number of rows beside it, so it may have the rows of the "
            "batch or none; name the arguments that have them: RaNNCModule(..., batch_arguments=[...]), by name or "
            "position"
        )


def _of_list(name: str) -> str:
    return f". {ADVICE}" if "[" in name else ""


def _positions(model: nn.Module) -> list[str]:
    """The arguments of forward that may be given by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _brought(tensor: Tensor) -> Hashable:
    return tuple(tensor.shape), str(tensor.dtype), digest(tensor)
