"""The parameters that an optimizer lists: all of them in the user's order, and which ranks update them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from pyrannc.errors import MismatchError
from pyrannc.job import agree, process
from pyrannc.store.divided import DividedParams, Part
from pyrannc.store.own_listed import all_listed, end_failed_step
from pyrannc.store.store import ParamStore

Label: TypeAlias = "tuple[int, str, int]"
"""A parameter as all ranks call it: the model's place among the optimizer's models and the parameter's first name, or
-1 and the place among the group's parameters that are of no model."""


@dataclass(frozen=True)
class Listed:
    """A parameter with its number in the optimizer's state, as torch counts without RaNNC.

    Attributes:
        group: place of its group.
        ranks: that update it, and keep its state; the first of them owns it.
        parts: where each rank updates and keeps another part of it, these.
    """

    number: int
    group: int
    param: Tensor
    ranks: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def part_on(self, rank: int) -> Part | None:
        """What a rank updates, unless it is all of it or nothing."""
        return next((part for part in self.parts if part.rank == rank), None)


class ParamLists:
    """The lists of an optimizer that trains deployed models.

    A parameter of a model is updated by the ranks that hold it. One that no Stage uses, or that is of no model, is
    updated by all ranks. ``param_groups`` lists all of them.

    Attributes:
        stores: of the models.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.stores: list[ParamStore] = []
        self._everywhere: list[Tensor] = []
        self._everywhere_key: list[list[int]] | None = None
        self._known: dict[int, tuple[Label, tuple[int, ...] | None]] = {}
        self._full: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self._names = _names_given(optimizer)

    # Which ranks list what

    def add(self, store: ParamStore) -> None:
        """A model of the optimizer has been deployed."""
        self.stores.append(store)
        self._renew()

    def remove(self, store: ParamStore) -> None:
        """A model of the optimizer is taken back."""
        self.stores.remove(store)
        self._renew()

    def _renew(self) -> None:
        self._known = {
            id(param): ((place, name, 0), store.holders.get(name))
            for place, store in enumerate(self.stores)
            for name, param in store.params.items()
        }
        self._everywhere_key = None

    def everywhere(self) -> list[Tensor]:
        """Those listed now that no Stage computes with; the same list again while nothing changes."""
        key = _ids([group["params"] for group in self._optimizer.param_groups])
        if key != self._everywhere_key:
            self._everywhere_key = key
            self._everywhere = [param for param in all_listed(self._optimizer) if self._held(param) is None]
        return self._everywhere

    def _listed(self, number: int, group: int, param: Tensor) -> Listed:
        held, parts = self._held(param), self._parts_of(param)
        if parts:
            return Listed(number, group, param, tuple(part.rank for part in parts), parts)
        return Listed(number, group, param, process.all_ranks() if held is None else held)

    def _parts_of(self, param: Tensor) -> tuple[Part, ...]:
        if id(param) not in self._known:
            return ()
        place, name, _ = self._known[id(param)][0]
        divided = self.stores[place].divided
        return divided.parts.get(name, ()) if divided is not None and divided.updated_by(self._optimizer) else ()

    @property
    def divided(self) -> list[DividedParams]:
        """What the optimizer updates in parts."""
        found = [store.divided for store in self.stores]
        return [params for params in found if params is not None and params.updated_by(self._optimizer)]

    def _held(self, param: Tensor) -> tuple[int, ...] | None:
        return self._known[id(param)][1] if id(param) in self._known else None

    def all(self) -> list[Listed]:
        """The parameters of all ranks, by number."""
        pairs = [(place, param) for place, params in enumerate(self._full) for param in params]
        return [self._listed(number, place, param) for number, (place, param) in enumerate(pairs)]

    @property
    def sizes(self) -> list[int]:
        """Number of parameters of each group, on all ranks together."""
        return [len(params) for params in self._full]

    @property
    def is_spread(self) -> bool:
        """True when some rank lacks some parameter, or a part of its state."""
        everyone = process.get_world_size()
        return any(item.parts or len(item.ranks) < everyone for item in self.all())

    # What the ranks must agree on

    def agree(self) -> None:
        """Raises on every rank, unless all list the same. All ranks call it."""
        everyone: list[list[list[Label]]] = agree.gather_objects(self._labels(self._full))
        for rank, found in enumerate(everyone):
            if found != everyone[0]:
                raise MismatchError(
                    f"the optimizer lists other parameters on rank {rank} ({_counts(found)}) than on rank 0 "
                    f"({_counts(everyone[0])}); make it of the same parameters, in the same order, on all ranks"
                )

    def follow(self) -> None:
        """Takes over what the script has changed in ``param_groups`` by hand. All ranks call it."""
        end_failed_step(self._optimizer)
        groups = [group["params"] for group in self._optimizer.param_groups]
        changed = _ids(groups) != _ids(self._full)
        everyone = agree.gather_numbers((int(changed), len(groups)))
        if len({count for _, count in everyone}) > 1:
            told = ", ".join(f"{count} on rank {rank}" for rank, (_, count) in enumerate(everyone))
            raise MismatchError(f"the optimizer has different numbers of param_groups: {told}")
        if any(flag for flag, _ in everyone):
            self._take_over(groups)

    def _take_over(self, own: Sequence[Sequence[Tensor]]) -> None:
        """The lists that the ranks' own ones are parts of become the whole ones."""
        self._names = {**_names_given(self._optimizer), **self._names}
        params = {label: store.params[label[1]] for store, label in self._all_labels()}
        everyone: list[list[list[Label]]] = agree.gather_objects(self._labels(own))
        full: list[list[Tensor]] = []
        for place, found in enumerate(zip(*everyone, strict=True)):
            of_none = [[label for label in labels if label[0] < 0] for labels in found]
            if any(labels != of_none[0] for labels in of_none):
                raise MismatchError(
                    f"group {place} of the optimizer's param_groups lists different numbers of parameters that are "
                    "not the model's; list the same ones on all ranks"
                )
            foreign = [param for param in own[place] if id(param) not in self._known]
            labels = found[0] if all(labels == found[0] for labels in found) else self._joined(place, found)
            full.append([foreign[label[2]] if label[0] < 0 else params[label] for label in labels])
        self._full = full
        self._everywhere_key = None
        for group, listed in zip(self._optimizer.param_groups, full, strict=True):
            group["params"] = list(listed)
            if "param_names" in group:
                group["param_names"] = [self._names.get(id(param), "") for param in listed]

    def _joined(self, place: int, found: Sequence[Sequence[Label]]) -> list[Label]:
        """The labels of all ranks in the order that they had before, or else in that of the model."""
        before = self._labels(self._full)[place] if place < len(self._full) else []
        order = [*before, *(label for _, label in self._all_labels())]
        places = {label: number for number, label in reversed(list(enumerate(order)))}
        every = {label for labels in found for label in labels}
        return sorted(every, key=lambda label: (places.get(label, len(order)), label))

    def _all_labels(self) -> Iterator[tuple[ParamStore, Label]]:
        for place, store in enumerate(self.stores):
            for name in store.params:
                yield store, (place, name, 0)

    def _labels(self, lists: Sequence[Sequence[Tensor]]) -> list[list[Label]]:
        return [self._labels_of(params) for params in lists]

    def _labels_of(self, params: Sequence[Tensor]) -> list[Label]:
        found: list[Label] = []
        for param in params:
            known = self._known.get(id(param))
            found.append((-1, "", sum(label[0] < 0 for label in found)) if known is None else known[0])
        return found


def _names_given(optimizer: Optimizer) -> dict[int, str]:
    return {
        id(param): name
        for group in optimizer.param_groups
        for param, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }


def _ids(lists: Sequence[Sequence[Any]]) -> list[list[int]]:
    return [list(map(id, params)) for params in lists]


def _counts(lists: Sequence[Sequence[Label]]) -> str:
    return " + ".join(str(len(labels)) for labels in lists) + " of them"
