"""Sums of gradients of which each rank keeps its part (ZeRO 2): what a microbatch adds is summed over ranks at once.

A microbatch's gradients of a bucket lie in memory of their own from when all have come until their sum is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.gradients import copy_each
from pyrannc.job.exchange import Group, Work, scatter_sum
from pyrannc.store.buckets import Bucket, elements_by, strides_of


class SpreadSums:
    """One bucket's.

    Args:
        bucket: which.
        part: where this rank keeps its part of the sums.
    """

    def __init__(self, bucket: Bucket, part: Tensor) -> None:
        self._bucket = bucket
        self._part = part
        self._sizes = [shared.param.numel() for shared in bucket.params]
        self._strides = [strides_of(shared.param) for shared in bucket.params]
        self._rest = bucket.room - sum(self._sizes)
        self._is_empty = True
        self._came: Tensor | None = None
        self._works: list[Work] = []
        self._arriving: Tensor | None = None

    def is_of_span_of(self, other: SpreadSums) -> bool:
        """True when one Span alone uses the parameters of both."""
        return self._bucket.span is not None and self._bucket.span == other._bucket.span

    def begin(self) -> None:
        """Forgets what was summed."""
        self._is_empty = True
        self._came = self._arriving = None
        self._works.clear()

    def put(self, places: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Takes gradients of a microbatch, of those parameters of the bucket that have some."""
        bucket = self._bucket
        came = torch.empty(bucket.room, dtype=bucket.message, device=bucket.device)
        parts = torch.split(came, [*self._sizes, self._rest])
        for place in set(range(len(parts))).difference(places):
            parts[place].zero_()
        flat = [
            elements_by(self._strides[place], grad, 0, grad.numel()) for place, grad in zip(places, grads, strict=True)
        ]
        copy_each([parts[place] for place in places], flat)
        self._came = came

    def start(self, group: Group | None) -> None:
        """Starts to sum what the microbatch has left over the ranks of the bucket: zeros if there is nothing."""
        if self._arriving is not None:
            # Of a microbatch without rows here no backward has waited.
            self.finish()
        bucket, came = self._bucket, self._came
        if came is None:
            came = torch.zeros(bucket.room, dtype=bucket.message, device=bucket.device)
        place = self._part if self._is_empty and self._part.dtype == bucket.message else None
        self._arriving, self._works = scatter_sum(came, bucket.parts, bucket.ranks, group, place)
        self._came = None

    def finish(self) -> None:
        """Waits for the sum under way (on a GPU: makes the stream wait), and adds this rank's part of it."""
        for work in self._works:
            work.wait()
        if self._arriving is None:
            if self._is_empty:
                self._part.zero_()
        elif self._is_empty:
            if self._arriving is not self._part:
                self._part.copy_(self._arriving)
        else:
            self._part.add_(self._arriving)
        self._is_empty, self._arriving, self._works = False, None, []
