"""Buckets: gradients of parameters with the same ranks and type, one behind the other in a flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyrannc.core.buckets import BucketsFacts
from pyrannc.errors import RaNNCError


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
        number: among all buckets of the job.
        numel: elements of all of them.
        ranks: that hold them.
        start: of the bucket among all of its type.
    """

    number: int
    params: list[SharedParam]
    numel: int
    ranks: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    start: int

    def placed(self) -> Iterator[tuple[SharedParam, int]]:
        """The parameters, and where each begins in the bucket."""
        start = 0
        for shared in self.params:
            yield shared, start
            start += shared.param.numel()


def own_buckets(facts: BucketsFacts, names: Sequence[str], shared: Sequence[SharedParam]) -> list[Bucket]:
    """The buckets of the parameters that this rank holds, in the order in which they are summed.

    Args:
        names: of the Graph's parameters.
        shared: the parameters that this rank holds.

    Raises:
        RaNNCError: types of parameters have changed since the model was captured, not all alike.
    """
    here = {param.name: param for param in shared}
    buckets: list[Bucket] = []
    ends: dict[torch.dtype, int] = {}
    for number, found in enumerate(facts.buckets):
        params = [here[names[param]] for param in found.params if names[param] in here]
        if not params:
            continue
        dtype, device = params[0].param.dtype, params[0].param.device
        other = next((shared for shared in params if shared.param.dtype != dtype), None)
        if other is not None:
            raise RaNNCError(
                f'parameter "{other.name}" has type {other.param.dtype} and "{params[0].name}" {dtype}, which had one '
                "type when the model was captured; convert the model before it is wrapped"
            )
        numel = sum(shared.param.numel() for shared in params)
        start = ends.get(dtype, 0)
        buckets.append(Bucket(number, params, numel, facts.groups[found.group], dtype, device, start))
        # Kernels and communication are fastest from places that are multiples of 16 bytes; these are.
        ends[dtype] = start + -(-numel // _ALIGNED) * _ALIGNED
    return buckets


_ALIGNED = 16


def like(flat: Tensor, param: Tensor) -> Tensor:
    """``flat`` with the parameter's shape and, where it is dense, with its strides."""
    return flat.as_strided(param.size(), strides_of(param))


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Strides of the parameter's gradient: its own where it is dense."""
    return (param if torch.ops.aten.is_non_overlapping_and_dense(param) else torch.empty_like(param)).stride()
