"""Buckets: gradients of parameters with the same ranks and type as views of one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Parameters whose gradients lie one behind the other.

    Attributes:
        numel: elements of all of them.
        ranks: that hold them.
    """

    params: list[SharedParam]
    numel: int
    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """A flat tensor for the gradients."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor by name of the parameter, formed like it."""
        views = {}
        offset = 0
        for shared in self.params:
            views[shared.name] = _like(flat.narrow(0, offset, shared.param.numel()), shared.param)
            offset += shared.param.numel()
        return views


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
    return sorted(buckets, key=lambda bucket: (bucket.ranks != stage_ranks, bucket.ranks))


def _like(flat: Tensor, param: Tensor) -> Tensor:
    """``flat`` with the parameter's shape and, where it is dense, with its strides."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return flat.as_strided(param.size(), param.stride())
    return flat.view(param.size())
