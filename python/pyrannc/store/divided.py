"""Parameters that Replicas update in parts, each a range of the elements, and then give to each other (Rajbhandari et
al., "ZeRO", SC 2020).

Such parameters lie one behind the other in the order of their gradients' buckets, so that parts of a bucket travel
without a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from pyrannc.core.buckets import BucketsFacts
from pyrannc.job import process
from pyrannc.job.exchange import Group, gather_each
from pyrannc.store.buckets import Bucket, elements, elements_by, like, strides_of, within
from pyrannc.store.gathered import GatheredBucket
from pyrannc.store.home import Guarded
from pyrannc.store.shown_state import StateForm
from pyrannc.store.spread_tensor import SpreadTensor, is_absent, is_spread, own_piece, spread_gradient, spread_param

GroupOf: TypeAlias = Callable[[tuple[int, ...]], Group | None]


@dataclass(frozen=True)
class Part:
    """What a rank updates of a parameter: elements ``start`` to ``end`` as they lie in memory."""

    rank: int
    start: int
    end: int

    def of(self, tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
        """These elements of a tensor of the parameter's shape, given the parameter's strides: in one dimension."""
        return elements_by(strides, tensor, self.start, self.end)


class Piece:
    """This rank's part of a parameter, as its optimizer sees it.

    Args:
        param: the whole parameter, in form at least.
        part: which elements.
        own: these, in one dimension.
        home: where the parameter's elements lie; ``None`` where it is not whole.
        name: first name of the parameter.
        ranks: that have its parts.

    Attributes:
        param: as given.
        form: of its state, where a part of that is kept here.
        tensor: a parameter of these elements, in the same memory: in one dimension, or formed like the whole if it is
            all of them; ``None`` if it is none of them.
    """

    def __init__(
        self, param: nn.Parameter, part: Part, own: Tensor, home: Tensor | None, name: str, ranks: tuple[int, ...]
    ) -> None:
        self.param = param
        self._part = part
        self._home = home
        self._strides = strides_of(param)
        self._is_whole = part.end - part.start == param.numel()
        self.tensor: nn.Parameter | None = None
        self.form: StateForm | None = None
        if part.end > part.start:
            if not self._is_whole:
                self.form = StateForm(name, ranks, param.size(), self._strides, part.start, part.end)
            self.tensor = nn.Parameter(like(own, param) if self._is_whole else own, param.requires_grad)

    def come_home(self) -> None:
        """Takes over data that the script has given the parameter elsewhere."""
        if self._home is None:
            return
        if self.param.data_ptr() != self._home.data_ptr():
            home = like(self._home, self.param)
            home.copy_(self.param.detach())
            self.param.data = home

    def take_gradient(self) -> None:
        """Gives the tensor its part of the parameter's gradient; inside of ``DisableTorchFunctionSubclass``."""
        if self.tensor is None:
            return
        grad = self.param.grad
        if grad is None or is_spread(grad):
            self.tensor.grad = None if grad is None else own_piece(grad)
        else:
            self.tensor.grad = self._part.of(grad, self._strides).as_strided(self.tensor.size(), self.tensor.stride())

    def drop_gradient(self) -> None:
        """Leaves the gradient to the parameter."""
        if self.tensor is not None:
            self.tensor.grad = None


@dataclass
class Works:
    """What is updated here of what a group of an optimizer lists, which holds for as long as it lists the same.

    Attributes:
        listed: the parameters of the group.
        kinds: their classes, which tell what is on other ranks.
        places: of those that are updated here.
        tensors: what is updated, in their order.
        pieces: of parameters of the group.
        parts_of_others: a parameter that another optimizer updates in parts, if the group has one.
    """

    listed: list[Tensor]
    kinds: list[type]
    places: list[int]
    tensors: list[Tensor]
    pieces: list[Piece]
    parts_of_others: Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[Tensor], pieces: Mapping[int, Piece]) -> Works:
        """Those of parameters, some of which may be updated in pieces, by ``id``."""
        kinds = list(map(type, params))
        if not pieces and not any(issubclass(kind, Guarded) for kind in set(kinds)):
            return cls(list(params), kinds, list(range(len(params))), list(params), [])
        found = [(place, _updated_of(param, pieces)) for place, param in enumerate(params)]
        updated = [(place, tensor) for place, tensor in found if tensor is not None]
        return cls(
            list(params),
            kinds,
            [place for place, _ in updated],
            [tensor for _, tensor in updated],
            [pieces[id(param)] for param in params if id(param) in pieces],
            next((param for param in params if is_spread(param) and id(param) not in pieces), None),
        )

    def hold(self, params: Sequence[Tensor]) -> bool:
        """True where the group lists the same; quick, as every step asks it."""
        same = len(params) == len(self.listed) and all(map(is_, params, self.listed))
        return same and list(map(type, params)) == self.kinds

    @property
    def are_all(self) -> bool:
        """True where all that is listed is updated here, as it is."""
        return len(self.tensors) == len(self.listed) and all(map(is_, self.tensors, self.listed))


def _updated_of(param: Tensor, pieces: Mapping[int, Piece]) -> Tensor | None:
    """What is updated here of a parameter that an optimizer lists."""
    piece = pieces.get(id(param))
    if piece is not None:
        return piece.tensor
    return None if is_absent(param) else param


class DividedParams:
    """The divided parameters of one rank's Stage.

    Args:
        buckets: of this rank's gradients.
        facts: the buckets of all ranks.
        names: of the Graph's parameters.
        sizes: elements of each parameter, by first name.
        groups: the process groups of some ranks: for sums, and for gathering under them.
        optimizer: that updates the parts.

    Attributes:
        pieces: this rank's, by ``id`` of the parameter.
        parts: of the divided parameters of all ranks, by first name, those that are not empty.
        spread: those of parameters of whose gradients each rank keeps a part.
        gathered: by first name, the parameters of this rank of which each rank keeps a part.
        in_parts: names of all such parameters, on all ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        facts: BucketsFacts,
        names: Sequence[str],
        sizes: Mapping[str, int],
        groups: tuple[GroupOf, GroupOf],
        optimizer: Optimizer,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group_of, self._gathering_group_of = groups
        self.pieces: dict[int, Piece] = {}
        self._works: list[Works] = []
        self.parts = all_parts(facts, names, sizes)
        self.spread = {
            name: self.parts[name] for bucket in facts.buckets if bucket.is_spread for name in bucket.of(names)
        }
        self.in_parts = {name for bucket in facts.buckets if bucket.is_gathered for name in bucket.of(names)}
        self.gathered: dict[str, GatheredBucket] = {}
        self._flats: list[tuple[Bucket, Tensor]] = []
        for bucket in [bucket for bucket in buckets if bucket.parts]:
            if bucket.is_gathered:
                self._part(bucket)
            else:
                self._place(bucket)

    @torch.no_grad()
    def _place(self, bucket: Bucket) -> None:
        """Puts parameters one behind the other."""
        flat = torch.zeros(bucket.room, dtype=bucket.types[1], device=bucket.device)
        for shared, start in bucket.placed():
            param, part = shared.param, self._own_part(shared.name)
            home = flat.narrow(0, start, param.numel())
            like(home, param).copy_(param)
            param.data = like(home, param)
            own = elements(param.detach(), part.start, part.end)
            self.pieces[id(param)] = Piece(param, part, own, home, shared.name, bucket.ranks)
        self._flats.append((bucket, flat))

    def _part(self, bucket: Bucket) -> None:
        """Leaves this rank its parts of parameters."""
        gathered = GatheredBucket(bucket, self._gathering_group_of(bucket.ranks))
        for shared, start in bucket.placed():
            param, part = shared.param, self._own_part(shared.name)
            own = (
                gathered.own[:0]
                if part.start == part.end
                else gathered.own.narrow(0, start + part.start - bucket.kept[0], part.end - part.start)
            )
            self.gathered[shared.name] = gathered
            grad = param.grad
            spread_param(param, shared.name, bucket.ranks, own.detach(), part.start)
            # What stood there before, as from another deployment, stays.
            param.grad = None if grad is None else self.own_gradient(shared.name, param, grad.to(bucket.device))
            self.pieces[id(param)] = Piece(param, part, own.detach(), None, shared.name, bucket.ranks)

    def _own_part(self, name: str) -> Part:
        rank = process.get_rank()
        return next((part for part in self.parts[name] if part.rank == rank), Part(rank, 0, 0))

    def updated_by(self, optimizer: Optimizer) -> bool:
        """True for the optimizer that updates the parts; another one updates whole parameters, on every Replica."""
        return self._optimizer() is optimizer

    def works(self, groups: Sequence[Sequence[Tensor]]) -> list[Works]:
        """What is updated here of what the groups of the optimizer list, found anew where they list something else."""
        if len(self._works) != len(groups) or not all(map(Works.hold, self._works, groups)):
            self._works = [Works.of(params, self.pieces) for params in groups]
        return self._works

    def gather(self) -> None:
        """After an update: gives every Replica the others' parts of what is whole. All ranks of the Stage call it."""
        by_ranks: dict[tuple[int, ...], list[tuple[Tensor, Sequence[int]]]] = {}
        for bucket, flat in self._flats:
            by_ranks.setdefault(bucket.ranks, []).append((flat, bucket.parts))
        works = [gather_each(flats, ranks, self._group_of(ranks)) for ranks, flats in by_ranks.items()]
        for work in chain.from_iterable(works):
            work.wait()
        # Who needs what was there before must notice, as after any change in place.
        increment_version([shared.param for bucket, _ in self._flats for shared in bucket.params])

    def own_gradient(self, name: str, param: Tensor, whole: Tensor) -> SpreadTensor:
        """What stands in a parameter's ``.grad``, of a whole gradient."""
        part = self._own_part(name)
        own = part.of(whole, strides_of(param)).clone()
        ranks = tuple(found.rank for found in self.parts[name])
        piece = like(own, param) if own.numel() == param.numel() else own
        return spread_gradient(param, name, ranks, piece, part.start)

    def own_elements(self, param: Tensor) -> Tensor:
        """This rank's part of a parameter, in one dimension."""
        tensor = self.pieces[id(param)].tensor
        return (
            torch.empty(0, dtype=param.dtype, device="cpu")
            if tensor is None
            else elements(tensor.detach(), 0, tensor.numel())
        )


def all_parts(facts: BucketsFacts, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, tuple[Part, ...]]:
    """The parts that are not empty of the divided parameters of all ranks, by first name.

    Args:
        names: of the Graph's parameters.
        sizes: elements of each, by name.
    """
    found = {}
    for bucket in facts.buckets:
        start = 0
        for name in bucket.of(names) if bucket.parts else []:
            shares = zip(facts.groups[bucket.group], bucket.parts, strict=True)
            found[name] = tuple(_parts_of(list(shares), start, sizes[name]))
            start += sizes[name]
    return found


def _parts_of(shares: Sequence[tuple[int, int]], start: int, numel: int) -> Iterator[Part]:
    """The parts of a parameter that begins at an element of a bucket, of which each rank has so many elements."""
    begin = 0
    for rank, size in shares:
        first, end = within((begin, begin + size), start, numel)
        if first < end:
            yield Part(rank, first, end)
        begin += size


def part_of_state(state: Mapping[str, object], param: Tensor, part: Part) -> dict[str, object]:
    """What a rank keeps of a parameter's state: of tensors of the parameter's shape its part, the rest as it is."""
    if part.end - part.start == param.numel():
        return dict(state)

    def own(value: object) -> object:
        if not _has_shape(value, param):
            return value
        assert isinstance(value, Tensor)
        return part.of(value, strides_of(param)).clone()

    return {key: own(value) for key, value in state.items()}


def whole_state(
    parts: Sequence[tuple[Part, Mapping[str, object]]], param: Tensor, device: torch.device
) -> dict[str, object]:
    """The state of a whole parameter, given that of all its parts."""
    found = dict(parts[0][1])
    for key, first in found.items():
        sizes = [(part.end - part.start,) for part, _ in parts]
        values = [state.get(key) for _, state in parts]
        shaped = [isinstance(v, Tensor) and tuple(v.shape) == size for v, size in zip(values, sizes, strict=True)]
        if isinstance(first, Tensor) and all(shaped):
            whole = torch.empty_strided(param.size(), strides_of(param), dtype=first.dtype, device=device)
            for (part, _), value in zip(parts, values, strict=True):
                assert isinstance(value, Tensor)
                elements(whole, part.start, part.end).copy_(value)
            found[key] = whole
    return found


def _has_shape(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0
