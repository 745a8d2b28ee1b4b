"""The gradients of one step: one flat tensor for each type, in which every bucket has its part."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.gradients import add_each, copy_each
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, storage_users, tensor_users
from pyrannc.store.buckets import Bucket, Types, like
from pyrannc.store.spread_sums import SpreadSums
from pyrannc.store.spread_tensor import is_spread, own_piece, spread_gradient


class GradientSet:
    """Memory for the gradients of the buckets' parameters; what is in it before :meth:`begin` is anything.

    Args:
        is_kept: one step alone writes to it, again and again.

    Attributes:
        is_kept: as given.
        flats: the sums, by types.
        views: the gradients by the parameters' names, as they stand in ``.grad``: of spread buckets this rank has
            pieces. Where the sums have another type, as of the last :meth:`settle`.
        spread: by place, the buckets of which each rank keeps a part.
        complete: names of parameters to which no backward of a microbatch adds.
    """

    def __init__(self, buckets: Sequence[Bucket], *, is_kept: bool = False) -> None:
        self.is_kept = is_kept
        self._buckets = buckets
        self.flats = _flats_of(buckets)
        # What is shown: before that is settled, messages in its type may lie there.
        self._given = {
            types: flat if flat.dtype == types[1] else torch.empty_like(flat, dtype=types[1])
            for types, flat in self.flats.items()
        }
        self._slices = [_slice(self.flats, bucket) for bucket in buckets]
        self._parts = [_parts(bucket, flat) for bucket, flat in zip(buckets, self._slices, strict=True)]
        self.spread = {
            index: SpreadSums(bucket, self._slices[index]) for index, bucket in enumerate(buckets) if bucket.is_spread
        }
        self.views = {
            name: view for bucket in buckets for name, view in _shown(bucket, _slice(self._given, bucket)).items()
        }
        self._fresh: list[set[int]] = [set() for _ in buckets]
        self.complete: set[str] = set()
        self._lent = [*self.views.values(), *(own_piece(view) for view in self.views.values() if is_spread(view))]
        self._unheld = self._users()

    def _users(self) -> tuple[int, int, int]:
        with DisableTorchFunctionSubclass():
            in_python, in_torch = sum(map(sys.getrefcount, self._lent)), sum(map(tensor_users, self._lent))
        return sum(map(storage_users, self._given.values())), in_torch, in_python

    @property
    def is_held(self) -> bool:
        """True while anything but this set has its views, as a ``.grad`` does, or shares its memory."""
        return self._users() != self._unheld

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return sum({flat.data_ptr(): flat.nbytes for flat in (*self.flats.values(), *self._given.values())}.values())

    def copy(self) -> GradientSet:
        """The same gradients in memory of their own."""
        made = GradientSet(self._buckets)
        made.take(self)
        return made

    def take(self, other: GradientSet) -> None:
        """Takes the contents of another set."""
        for types, flat in self.flats.items():
            flat.copy_(other.flats[types])
            if self._given[types] is not flat:
                self._given[types].copy_(other._given[types])

    def settle(self) -> bool:
        """Rounds the sums to the parameters' types; false if they have them."""
        others = [(self._given[types], flat) for types, flat in self.flats.items() if self._given[types] is not flat]
        for given, flat in others:
            given.copy_(flat)
        return bool(others)

    def begin(self) -> None:
        """Forgets what was written."""
        self._fresh = [set(range(len(bucket.params))) for bucket in self._buckets]
        self.complete.clear()
        for sums in self.spread.values():
            sums.begin()

    def bucket(self, index: int) -> Tensor:
        """The gradients of a bucket that is not spread; zeros where nothing was written."""
        for place in self._fresh[index]:
            self._parts[index][place].zero_()
        return self._slices[index]

    def message(self, index: int) -> Tensor:
        """The same as it is summed over ranks: what :meth:`bucket` gives, or a copy in another type.

        One in the parameters' type takes the memory of :attr:`views`, which shows gradients again after :meth:`settle`.
        """
        sums, given, dtype = self.bucket(index), _slice(self._given, self._buckets[index]), self._buckets[index].message
        if dtype == sums.dtype:
            return sums
        return given.copy_(sums) if dtype == given.dtype else sums.to(dtype)

    def clear(self, index: int) -> None:
        """A bucket gets no more: zeros where nothing was written."""
        if index in self.spread:
            self.spread[index].finish()
        else:
            self.bucket(index)

    def put(self, index: int, places: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Writes gradients of parameters of a bucket, or adds them to what was written."""
        parts, fresh = self._parts[index], self._fresh[index]
        if index in self.spread:
            self.spread[index].put(places, grads)
            fresh.difference_update(places)
            return
        if len(places) == len(fresh) == len(parts):
            copy_each(parts, list(grads))
            fresh.clear()
            return
        found = [(parts[place], grad, place in fresh) for place, grad in zip(places, grads, strict=True)]
        for write, first in ((copy_each, True), (add_each, False)):
            chosen = [(part, grad) for part, grad, is_first in found if is_first is first]
            if chosen:
                write([part for part, _ in chosen], [grad for _, grad in chosen])
        fresh.difference_update(places)

    def read(self, index: int, places: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Copies what the bucket has for some parameters."""
        if grads:
            copy_each(list(grads), [self._parts[index][place] for place in places])

    def touched(self) -> Iterator[str]:
        """Names of the parameters whose gradients were written."""
        for bucket, fresh in zip(self._buckets, self._fresh, strict=True):
            yield from (shared.name for place, shared in enumerate(bucket.params) if place not in fresh)


def _flats_of(buckets: Sequence[Bucket]) -> dict[Types, Tensor]:
    """A flat tensor for the sums of each types, in which every bucket has its place; what is in those is anything."""
    sizes: dict[Types, int] = {}
    for bucket in buckets:
        sizes[bucket.types] = max(sizes.get(bucket.types, 0), bucket.start + bucket.kept[1] - bucket.kept[0])
    device = buckets[0].device if buckets else None
    flats = {types: torch.empty(numel, dtype=types[0], device=device) for types, numel in sizes.items()}
    for bucket in buckets:
        # What lies between buckets is scaled, and may travel, with them.
        flats[bucket.types][bucket.start + bucket.kept[1] - bucket.kept[0] : bucket.start + bucket.kept_room].zero_()
    return flats


def _slice(flats: Mapping[Types, Tensor], bucket: Bucket) -> Tensor:
    return flats[bucket.types].narrow(0, bucket.start, bucket.kept[1] - bucket.kept[0])


def _shown(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """What stands in ``.grad``, by the parameters' names."""
    found = dict(zip([shared.name for shared in bucket.params], _parts(bucket, flat), strict=True))
    for shared, start in bucket.placed() if bucket.is_spread else ():
        first, _ = bucket.kept_of(start, shared.param.numel())
        found[shared.name] = spread_gradient(shared.param, shared.name, bucket.ranks, found[shared.name], first)
    return found


def _parts(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """What is kept of each parameter's gradient: formed like it if that is all of it, else in one dimension."""
    found = []
    for shared, start in bucket.placed():
        numel = shared.param.numel()
        first, end = bucket.kept_of(start, numel)
        kept = flat.narrow(0, start + first - bucket.kept[0], end - first) if end > first else flat[:0]
        found.append(like(kept, shared.param) if end - first == numel else kept)
    return found
