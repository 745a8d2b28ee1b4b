"""Which tensors of a call have the rows of the batch as dimension 0: told by the user, or proven.

An extent that equals the number of rows proves nothing. A tensor has rows if ranks with other batches bring others,
or if the model does not run when only the other tensors have them.

Of a packed tensor, as of the patches of all images, each row has several elements of dimension 0, as many as any other;
the number of rows is that of the tensors that are not packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyrannc.call.equal import digest, names_inside
from pyrannc.call.lists_of_rows import ADVICE, refuse_lists_of_rows
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import Sample, Structure, batch_rows, can_be_traced, first_that_may_lack_rows, flatten
from pyrannc.capture.user.row_lists import RowList
from pyrannc.errors import InputError, MismatchError
from pyrannc.job import agree, process

BatchNames = Sequence[str | int]
"""Names, or positions, of arguments of the model's forward."""
PerRow = tuple[int, ...]
"""For each tensor of the arguments, how many elements of its dimension 0 each row has; 0: it has no rows."""
PACKED = (
    "a packed tensor, as of the patches of all images, has as many elements of dimension 0 for each row as for any "
    "other, on all ranks: bring images of one size in a batch, and as many for each row"
)
_Extents = list[list[int]]
"""Dimension 0 of each tensor, by rank; -1 where there is none."""


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

    def rows(self, per_row: PerRow) -> int:
        """The rows of the batch."""
        return _rows_of(_extents(self), per_row)

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


class RowsInDoubt:
    """Tensors of a call that have as many elements as the batch has rows, and may yet have none of them.

    Each rank looks with its own arguments: what a model asks of its data can decide.

    Args:
        sample: the call, in which they have rows.
        places: theirs.
        accept: is called when they are taken to have rows, and told whether that is proven.
        refuse: raises InputError for one that may have none.

    Attributes:
        is_open: nothing has been proven, nor taken for granted.
    """

    def __init__(
        self,
        sample: Sample,
        places: Sequence[int],
        accept: Callable[[bool], None],
        refuse: Callable[[int], NoReturn],
    ) -> None:
        self.is_open = True
        self._sample = sample
        self._places = places
        self._accept = accept
        self._refuse = refuse
        self._found: int | None = None

    def look(self, share: int, shares: int, *, is_plain: bool = False) -> None:
        """Looks at a share of them: takes a trace for each.

        Args:
            is_plain: of the captured call.
        """
        self._found = first_that_may_lack_rows(self._sample, self._places[share::shares], is_plain=is_plain)

    def settle(self) -> None:
        """Ends the doubt, when all shares have been looked at. All ranks call it.

        Raises:
            InputError: one may have no rows.
        """
        found = [place for place in agree.gather_objects(self._found) if place is not None]
        if found:
            self._refuse(min(found))
        self._end(is_proven=True)

    def take_for_granted(self) -> None:
        """Ends the doubt unproven, where nothing is cut: rows or none, what is computed is the same.

        Once they have other extents than the batch, they have none.
        """
        self._end(is_proven=False)

    def _end(self, *, is_proven: bool) -> None:
        self.is_open = False
        self._accept(is_proven)

    def look_and_settle(self, batch: BatchRows) -> None:
        """Both, at once. All ranks call it.

        Raises:
            InputError: one may have no rows.
        """
        own, looking = process.get_rank(), [rank for rank, rows in enumerate(batch.per_rank) if rows]
        agree.together(lambda: self.look(looking.index(own), len(looking)) if own in looking else None)
        self.settle()


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
        self._found: dict[Hashable, PerRow] = {}
        self._unproven: set[Hashable] = set()
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

    def known(self, call: Arguments) -> PerRow | None:
        """The elements of each row, if it is known without the other ranks which tensors have rows.

        Raises:
            InputError: these have not as many elements for each row.
        """
        found = self._found.get(call.key)
        if found is None:
            return None
        if call.key in self._unproven:
            return _narrowed(call, found)
        places = [place for place, count in enumerate(found) if count]
        extents = [int(call.tensors[place].shape[0]) for place in places]
        # With a batch that has no rows they are what they were.
        return _counted(call, [_extents(call)], places) if any(extents) else found

    def still_in_doubt(self, call: Arguments, device: torch.device) -> RowsInDoubt | None:
        """What has been taken for granted of such calls, to be proven if batches are cut from now on."""
        if call.key not in self._unproven:
            return None
        return self._doubt(call, _narrowed(call, self._found[call.key]), [False] * len(call.tensors), device)

    def _as_named(self, call: Arguments, named: BatchNames) -> tuple[bool, ...]:
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

    def check(self, call: Arguments) -> None:
        """Raises InputError for a call that has no rows, before it is found out which tensors have them."""
        if self._named is not None:
            if not any(self._as_named(call, self._named)):
                raise InputError("the batch size cannot be told: no argument in batch_arguments is a tensor with rows")
            return
        try:
            rows = batch_rows(call.tensors)
        except ValueError as error:
            raise InputError(str(error)) from None
        refuse_lists_of_rows(call.args, call.kwargs, call.tensors, rows)

    def find(self, call: Arguments, device: torch.device) -> tuple[PerRow, RowsInDoubt | None]:
        """Finds out which tensors have rows, and what is to be proven of them. All ranks call it.

        Raises:
            InputError: a tensor has not as many elements for each row.
            MismatchError: a tensor without rows has another value on another rank, or rows have other numbers of
                elements there.
        """
        named = None if self._named is None else self._as_named(call, self._named)
        brought = [
            None if named is not None and named[place] else _brought(tensor)
            for place, tensor in enumerate(call.tensors)
        ]
        own = _extents(call), brought, tuple(call.in_row_lists)
        everyone: list[tuple[list[int], list[Hashable], tuple[bool, ...]]] = agree.gather_objects(own)
        if len({len(brought) for _, brought, _ in everyone}) > 1:
            raise MismatchError("the ranks pass different numbers of tensors")
        if len({in_row_lists for *_, in_row_lists in everyone}) > 1:
            raise MismatchError("an argument is a list of rows on some ranks, and none on others")
        if not self._gather_inputs:
            everyone = everyone[:1]
        extents = [extents for extents, *_ in everyone]
        differs = [len(set(values)) > 1 for values in zip(*(values for _, values, _ in everyone), strict=True)]
        if named is None:
            found = self._by_extents(call, extents, differs, device)
            doubt = self._doubt(call, found, differs, device)
        else:
            _refuse_differing(call, named, differs)
            found, doubt = _counted(call, extents, [place for place, mark in enumerate(named) if mark]), None
        if doubt is None:
            self._note(call, found, is_proven=True)
        return found, doubt

    def _note(self, call: Arguments, found: PerRow, *, is_proven: bool) -> None:
        self._found[call.key] = found
        (self._unproven.discard if is_proven else self._unproven.add)(call.key)

    def _by_extents(self, call: Arguments, extents: _Extents, differs: Sequence[bool], device: torch.device) -> PerRow:
        first = next(place for place, extent in enumerate(extents[0]) if extent >= 0)
        found = _alike(extents, {first: 1})
        if any(differ and not count for differ, count in zip(differs, found, strict=True)):
            # One number for all rows has no dimension 0: that it differs is refused below.
            places = [place for place, differ in enumerate(differs) if differ and extents[0][place] >= 0]
            packed = _counts(extents, places)
            found = found if packed is None else _alike(extents, packed)
        _refuse_differing(call, found, differs)
        return self._of_fewer_rows(call, extents, found, differs, device)

    def _doubt(
        self, call: Arguments, found: PerRow, differs: Sequence[bool], device: torch.device
    ) -> RowsInDoubt | None:
        # A single one is the batch, for there has to be one.
        certain = [differ or is_list for differ, is_list in zip(differs, call.in_row_lists, strict=True)]
        open_places = [place for place, count in enumerate(found) if count and not certain[place]]
        if not open_places or sum(map(bool, found)) == 1:
            return None
        sample = Sample(self._model, call.args, call.kwargs, device, call.rows(found), found)

        def accept(is_proven: bool) -> None:
            self._note(call, found, is_proven=is_proven)

        return RowsInDoubt(sample, open_places, accept, lambda place: self._refuse_unproven(call, place))

    def _of_fewer_rows(
        self, call: Arguments, extents: _Extents, found: PerRow, differs: Sequence[bool], device: torch.device
    ) -> PerRow:
        """What has rows where others are packed beside a tensor that ranks bring alike, as the sizes of equal images.

        Only if the model does not run while that has none.
        """
        if len(extents) == 1 or max(found) > 1:
            return found

        def fewer() -> PerRow | None:
            if process.get_rank() != 0:
                return None
            rows = _rows_of(extents[0], found)
            for least in sorted({extent for extent in extents[0] if 0 < extent < rows}):
                own = [place for place, extent in enumerate(extents[0]) if extent == least and not differs[place]]
                packed = own and _counts(extents, [*own, *(place for place, count in enumerate(found) if count)])
                if not packed:
                    continue
                per_row = _as_tuple(packed, len(found))
                sample = Sample(self._model, call.args, call.kwargs, device, least, per_row)
                if first_that_may_lack_rows(sample, own) is not None:
                    continue
                if can_be_traced(sample):
                    return per_row
            return None

        packed: PerRow | None = agree.broadcast_object(agree.together(fewer))
        return packed or found

    def _refuse_unproven(self, call: Arguments, place: int) -> NoReturn:
        shape = tuple(call.tensors[place].shape)
        same = " and is the same on all ranks" if process.get_world_size() > 1 and self._gather_inputs else ""
        raise InputError(
            f"argument {call.names[place]} (shape {shape}) has as many elements in dimension 0 as the batch has rows"
            f"{same}, but the model also runs with another number of rows beside it, so it may have the rows of the "
            "batch or none; name the arguments that have them: RaNNCModule(..., batch_arguments=[...]), by name or "
            "position"
        )


def _rows_of(extents: Sequence[int], per_row: PerRow) -> int:
    """The rows of a batch whose tensors have these extents of dimension 0."""
    place = next(place for place, count in enumerate(per_row) if count)
    return extents[place] // per_row[place]


def _extents(call: Arguments) -> list[int]:
    return [int(tensor.shape[0]) if tensor.dim() else -1 for tensor in call.tensors]


def _counts(extents: _Extents, places: Collection[int]) -> dict[int, int] | None:
    """The elements of each row of tensors that all have rows, if there are as many for each row on all ranks."""
    own = [[of_rank[place] for place in places] for of_rank in extents if any(of_rank[place] for place in places)]
    if not own:
        return dict.fromkeys(places, 1)
    found = {tuple(divmod(extent, max(1, min(of_rank))) for extent in of_rank) for of_rank in own}
    counts = found.pop()
    if found or any(rest or not count for count, rest in counts):
        return None
    return dict(zip(places, (count for count, _ in counts), strict=True))


def _alike(extents: _Extents, counts: dict[int, int]) -> PerRow:
    """Adds the tensors that have as many elements as one of these on each rank."""
    by_extents = {tuple(of_rank[place] for of_rank in extents): count for place, count in counts.items()}
    return tuple(by_extents.get(own, 0) for own in zip(*extents, strict=True))


def _narrowed(call: Arguments, found: PerRow) -> PerRow:
    """Without what has another extent than the first of them, the batch."""
    extents = _extents(call)
    rows = next(extent for extent, count in zip(extents, found, strict=True) if count)
    return tuple(count if extent == rows else 0 for extent, count in zip(extents, found, strict=True))


def _as_tuple(counts: dict[int, int], length: int) -> PerRow:
    return tuple(counts.get(place, 0) for place in range(length))


def _counted(call: Arguments, extents: _Extents, places: Sequence[int]) -> PerRow:
    """The elements of each row where it is known which tensors have rows.

    Raises:
        InputError: a tensor has not as many for each row.
        MismatchError: another rank has other numbers.
    """
    found = _counts(extents, places)
    if found is not None:
        return _as_tuple(found, len(call.tensors))
    for of_rank in extents:
        least = min(places, key=of_rank.__getitem__)
        for place in places:
            if not of_rank[least] or of_rank[place] % of_rank[least]:
                raise InputError(
                    f"argument {call.names[place]} has {of_rank[place]} rows where argument {call.names[least]} has "
                    f"{of_rank[least]}; if not both have the rows of the batch, name those that do: "
                    f"RaNNCModule(..., batch_arguments=[...]); {PACKED}"
                )
    told = "; ".join(
        f"rank {rank}: " + ", ".join(f"{of_rank[place]} of {call.names[place]}" for place in places)
        for rank, of_rank in enumerate(extents)
    )
    raise MismatchError(f"a row has other numbers of elements on one rank than on another ({told}): {PACKED}")


def _refuse_differing(call: Arguments, with_rows: Sequence[int], differs: Sequence[bool]) -> None:
    for name, count, differ in zip(call.names, with_rows, differs, strict=True):
        if differ and not count:
            raise MismatchError(
                f"argument {name} has another value on one rank than on another; give all ranks the same one "
                f"(what differs from row to row is a tensor with the batch as dimension 0; {PACKED}){_of_list(name)}"
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
