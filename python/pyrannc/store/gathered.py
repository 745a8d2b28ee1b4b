"""Parameters of which each Replica keeps a part, and which are whole only while a Span computes with them, or from the
first use in a run to its end (ZeRO 3)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import version
from pyrannc.errors import RaNNCError
from pyrannc.job.exchange import Group, Work, gather_parts
from pyrannc.store.buckets import Bucket, elements_by, like, strides_of


class GatheredBucket:
    """One bucket's parameters.

    Args:
        bucket: which; its parameters are whole.
        group: the process group of its ranks, for gathering alone.

    Attributes:
        own: this rank's part, in one dimension.
        dtype: the parameters' own type.
        leaves: what Stages compute with, by first name.
        is_alone: nothing is gathered; what comes into the others' places is anything.
    """

    is_alone = False

    @torch.no_grad()
    def __init__(self, bucket: Bucket, group: Group | None) -> None:
        self._bucket = bucket
        self._group = group
        self.dtype = bucket.types[1]
        self._wholes: dict[torch.dtype, Tensor] = {}
        self._works: list[Work] = []
        self._is_started = False
        self.leaves = self._leaves(self.dtype)
        self._empty()
        self.own = self._own_part()
        self._copies: dict[torch.dtype, dict[str, Tensor]] = {}

    def _own_part(self) -> Tensor:
        """What this rank keeps of the parameters, which may be on the host: nothing else of them goes to the device."""
        first, end = self._bucket.kept
        own = torch.zeros(end - first, dtype=self.dtype, device=self._bucket.device)
        for shared, start in self._bucket.placed():
            begin, stop = self._bucket.kept_of(start, shared.param.numel())
            if begin < stop:
                part = elements_by(strides_of(shared.param), shared.param.detach(), begin, stop)
                own.narrow(0, start + begin - first, stop - begin).copy_(part)
        return own

    @property
    def is_kept(self) -> bool:
        """True where the parameters stay whole to the end of a run."""
        return self._bucket.is_kept

    def _leaves(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of a type in memory that is there from a gathering to its release."""
        whole = self._wholes[dtype] = torch.empty(self._bucket.room, dtype=dtype, device=self._bucket.device)
        leaves = {}
        for shared, start in self._bucket.placed():
            leaf = torch.empty(0, dtype=dtype, device=self._bucket.device)
            # It must not share the counter of changes: autograd would take a gathering for one.
            leaf.data = like(whole.narrow(0, start, shared.param.numel()), shared.param)
            leaves[shared.name] = leaf.requires_grad_(shared.param.requires_grad)
        return leaves

    def _empty(self) -> None:
        for whole in self._wholes.values():
            whole.untyped_storage().resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes of what is gathered now."""
        return sum(whole.untyped_storage().nbytes() for whole in self._wholes.values())

    def copy(self, name: str, dtype: torch.dtype) -> Tensor:
        """What a Stage computes with in the place of a parameter that it only converts."""
        if dtype not in self._copies:
            self._copies[dtype] = self._leaves(dtype)
            self._wholes[dtype].untyped_storage().resize_(0)
        return self._copies[dtype][name]

    @property
    def version(self) -> int:
        """Of what would be gathered now; contents of equal versions are equal."""
        return version(self.own)

    def refuse_changed(self, before: int) -> None:
        """Raises RaNNCError if a backward would compute with other parameters than its forward."""
        if self.version != before:
            name = self._bucket.params[0].name
            raise RaNNCError(
                f'parameter "{name}" has changed between a call of the model and its backward, and is not kept whole: '
                "call backward() before optimizer.step() and before the next call, or keep parameters whole with "
                "RANNC_ENABLE_ZERO=2"
            )

    @torch.no_grad()
    def start(self, types: Iterable[torch.dtype]) -> None:
        """Starts to gather what the other ranks have.

        Args:
            types: in which Spans compute with it, in an order that is the same on all ranks.
        """
        if self._is_started:
            return
        self._is_started = True
        bucket = self._bucket
        for kind in types:
            whole = self._wholes[kind]
            whole.untyped_storage().resize_(whole.nbytes)
            is_copy = kind != self.dtype
            if self.is_alone or is_copy:
                whole[slice(*bucket.kept)].copy_(self.own)
            if not self.is_alone:
                own = None if is_copy else self.own
                self._works += gather_parts(whole, bucket.parts, bucket.ranks, self._group, own)

    def wait(self) -> None:
        """Waits until all is here (on a GPU: makes the stream wait)."""
        for work in self._works:
            work.wait()
        self._works.clear()

    def forget_gathers(self) -> None:
        """Of a recording that failed, in which nothing moved: frees what was gathered."""
        self._works.clear()
        self.release()

    def let_go(self) -> None:
        """A Span has computed with it: frees what was gathered, unless that stays whole."""
        if not self.is_kept:
            self.release()

    def release(self) -> None:
        """Frees what was gathered, once it is there: what still comes would be written to memory of others."""
        if self._is_started:
            self.wait()
            self._empty()
            self._is_started = False

    def clear(self) -> None:
        """Drops gradients that a failed step has left, and what it has gathered."""
        leaves: Iterable[Tensor] = (leaf for kind in (self.leaves, *self._copies.values()) for leaf in kind.values())
        for leaf in leaves:
            leaf.grad = None
        self.release()
