"""Parameters that Replicas update in parts, each a range of the elements, and then give to each other (Rajbhandari et
al., "ZeRO", SC 2020).

Such parameters lie one behind the other in the order of their gradients' buckets, so that parts of a bucket travel
without a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from pyrannc.core.buckets import BucketsFacts
from pyrannc.job import process
from pyrannc.job.exchange import Group, gather_parts
from pyrannc.store.buckets import Bucket, elements, laid_out, like, strides_of
from pyrannc.store.spread_gradient import SpreadGradient


@dataclass(frozen=True)
class Part:
    """What a rank updates of a parameter: elements ``start`` to ``end`` as they lie in memory."""

    rank: int
    start: int
    end: int


class Piece:
    """This rank's part of a parameter, as its optimizer sees it.

    Attributes:
        param: the whole parameter.
        part: which elements.
        tensor: a parameter of these elements in the memory of the whole: in one dimension, or formed like the whole if
            it is all of them; ``None`` if it is none of them.
    """

    def __init__(self, param: nn.Parameter, part: Part, home: Tensor) -> None:
        self.param = param
        self.part = part
        self._home = home
        self._strides = strides_of(param)
        self._is_whole = part.end - part.start == param.numel()
        self.tensor: nn.Parameter | None = None
        if part.end > part.start:
            self.tensor = nn.Parameter(self._own(param.detach()), param.requires_grad)

    def _own(self, tensor: Tensor) -> Tensor:
        """Of a tensor that is laid out like the parameter."""
        return tensor if self._is_whole else elements(tensor, self.part.start, self.part.end)

    def come_home(self) -> None:
        """Takes over data that the script has given the parameter elsewhere."""
        home = like(self._home, self.param)
        if self.param.data_ptr() != home.data_ptr():
            home.copy_(self.param.detach())
            self.param.data = home

    def take_gradient(self) -> None:
        """Gives the tensor its part of the parameter's gradient."""
        if self.tensor is None:
            return
        grad = self.param.grad
        if grad is None or isinstance(grad, SpreadGradient):
            self.tensor.grad = None if grad is None else grad.piece
        else:
            self.tensor.grad = self._own(laid_out(grad, self._strides))

    def drop_gradient(self) -> None:
        """Leaves the gradient to the parameter."""
        if self.tensor is not None:
            self.tensor.grad = None


class DividedParams:
    """The divided parameters of one rank's Stage.

    Args:
        buckets: of this rank's gradients.
        parts: of the divided parameters of all ranks, by first name.
        spread: names of those of whose gradients each rank keeps a part.
        group: the process group of some ranks.
        optimizer: that updates the parts.

    Attributes:
        pieces: this rank's, by ``id`` of the parameter.
        parts: as given.
        spread: those of ``spread``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parts: Mapping[str, tuple[Part, ...]],
        spread: Set[str],
        group: Callable[[tuple[int, ...]], Group | None],
        optimizer: Optimizer,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._buckets = [bucket for bucket in buckets if bucket.parts]
        self._group = group
        self.pieces: dict[int, Piece] = {}
        self.parts = parts
        self.spread = {name: found for name, found in parts.items() if name in spread}
        self._flats = [self._place(bucket) for bucket in self._buckets]

    @torch.no_grad()
    def _place(self, bucket: Bucket) -> Tensor:
        flat = torch.zeros(bucket.room, dtype=bucket.types[1], device=bucket.device)
        for shared, start in bucket.placed():
            flat_home = flat.narrow(0, start, shared.param.numel())
            home = like(flat_home, shared.param)
            home.copy_(shared.param)
            shared.param.data = home
            rank = process.get_rank()
            own = next((part for part in self.parts[shared.name] if part.rank == rank), Part(rank, 0, 0))
            self.pieces[id(shared.param)] = Piece(shared.param, own, flat_home)
        return flat

    def updated_by(self, optimizer: Optimizer) -> bool:
        """True for the optimizer that updates the parts; another one updates whole parameters, on every Replica."""
        return self._optimizer() is optimizer

    def gather(self) -> None:
        """After an update: gives every Replica the others' parts. All ranks of the Stage call it."""
        works = [
            work
            for bucket, flat in zip(self._buckets, self._flats, strict=True)
            for work in gather_parts(flat, bucket.parts, bucket.ranks, self._group(bucket.ranks))
        ]
        for work in works:
            work.wait()
        # Who needs what was there before must notice, as after any change in place.
        increment_version([shared.param for bucket in self._buckets for shared in bucket.params])


def all_parts(facts: BucketsFacts, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, tuple[Part, ...]]:
    """The parts that are not empty of the divided parameters of all ranks, by first name.

    Args:
        names: of the Graph's parameters.
        sizes: elements of each, by name.
    """
    found = {}
    for bucket in facts.buckets:
        start = 0
        for name in [names[param] for param in bucket.params] if bucket.parts else []:
            shares = zip(facts.groups[bucket.group], bucket.parts, strict=True)
            found[name] = tuple(_parts_of(list(shares), start, sizes[name]))
            start += sizes[name]
    return found


def spread_names(facts: BucketsFacts, names: Sequence[str]) -> frozenset[str]:
    """Names of the parameters of all ranks of whose gradients each rank keeps a part."""
    return frozenset(names[param] for bucket in facts.buckets if bucket.is_spread for param in bucket.params)


def _parts_of(shares: Sequence[tuple[int, int]], start: int, numel: int) -> Iterator[Part]:
    """The parts of a parameter that begins at an element of a bucket, of which each rank has so many elements."""
    begin = 0
    for rank, size in shares:
        first, end = (min(max(place - start, 0), numel) for place in (begin, begin + size))
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
        return elements(laid_out(value, strides_of(param)), part.start, part.end).clone()

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
