"""Buckets: gradients of parameters with the same ranks and type, one behind the other in a flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyrannc._native import BUCKET_BYTES, FIRST_BUCKET_BYTES


@dataclass(frozen=True)
class SharedParam:
    """A parameter that this rank holds, and the ranks that hold it too (this one included)."""

    name: str
    param: nn.Parameter
    ranks: tuple[int, ...]


@dataclass
class Bucket:
    """Parameters whose gradients lie one behind the other, in the order in which they come.

    Attributes:
        numel: elements of all of them.
        ranks: that hold them.
        start: of the bucket among all of its type.
    """

    params: list[SharedParam]
    numel: int
    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: int = 0

    def placed(self) -> Iterator[tuple[SharedParam, int]]:
        """The parameters, and where each begins in the bucket."""
        start = 0
        for shared in self.params:
            yield shared, start
            start += shared.param.numel()


def divide(params: Sequence[SharedParam], stage_ranks: tuple[int, ...]) -> list[Bucket]:
    """Buckets of parameters in the order in which their gradients come: the Stage's own first, then by ranks."""
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[tuple[int, ...], torch.dtype], Bucket] = {}
    for shared in params:
        key = (shared.ranks, shared.param.dtype)
        bucket = open_buckets.get(key)
        first = shared.ranks == stage_ranks and bucket is not None and bucket is buckets[0]
        limit = FIRST_BUCKET_BYTES if first else BUCKET_BYTES
        if bucket is None or bucket.numel * bucket.dtype.itemsize >= limit:
            bucket = Bucket([], 0, shared.ranks, shared.param.dtype, shared.param.device)
            open_buckets[key] = bucket
            buckets.append(bucket)
        bucket.params.append(shared)
        bucket.numel += shared.param.numel()
    buckets.sort(key=lambda bucket: (bucket.ranks != stage_ranks, bucket.ranks))
    ends: dict[torch.dtype, int] = {}
    for bucket in buckets:
        bucket.start = ends.get(bucket.dtype, 0)
        # Kernels and communication are fastest from places that are multiples of 16 bytes; these are.
        ends[bucket.dtype] = bucket.start + -(-bucket.numel // _ALIGNED) * _ALIGNED
    return buckets


_ALIGNED = 16


def like(flat: Tensor, param: Tensor) -> Tensor:
    """``flat`` with the parameter's shape and, where it is dense, with its strides."""
    return flat.as_strided(param.size(), strides_of(param))


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Strides of the parameter's gradient: its own where it is dense."""
    return (param if torch.ops.aten.is_non_overlapping_and_dense(param) else torch.empty_like(param)).stride()
