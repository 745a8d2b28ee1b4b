"""Buckets: gradients of parameters with the same ranks and type, one behind the other in a flat tensor.

What is added up is added up in float32 at least, unless the configuration asks for less; gradients end in the
parameters' type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pyrannc.blocks.conversion import HALF
from pyrannc.capture.reads.lacking import Lacking
from pyrannc.core.buckets import BucketsFacts
from pyrannc.errors import RaNNCError
from pyrannc.job import process


@dataclass(frozen=True)
class SharedParam:
    """A parameter that this rank holds, and the ranks that hold it too (this one included)."""

    name: str
    param: nn.Parameter
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class SumTypes:
    """In which types gradients are summed.

    Attributes:
        reduce: over ranks: ``"float32"``, where the parameters have no wider type, ``"bfloat16"``, or ``"param"``, the
            parameters' own.
        several: there are several microbatches, whose gradients are added up in float32 at least.
    """

    reduce: str
    several: bool

    def of_sums(self, param: torch.dtype, ranks: int) -> torch.dtype:
        """That of the sums on a rank. Where nothing is added, gradients keep the parameters' type."""
        wide = self.several or (ranks > 1 and self.reduce == "float32")
        return torch.float32 if param in HALF and wide else param

    def of_messages(self, param: torch.dtype, ranks: int) -> torch.dtype:
        """That of what ranks sum over each other."""
        if self.reduce == "bfloat16" and (param in HALF or param == torch.float32):
            return torch.bfloat16
        return param if self.reduce == "param" else self.of_sums(param, ranks)


Types: TypeAlias = tuple[torch.dtype, torch.dtype]
"""That of the sums, and that of the parameters."""


@dataclass
class Bucket:
    """Parameters whose gradients lie one behind the other, in the order in which they come.

    Attributes:
        number: among all buckets of the job.
        numel: elements of all of them.
        ranks: that hold them.
        types: of the sums and of the parameters.
        message: type in which they are summed over ranks.
        device: where they lie.
        start: of the bucket among all of its types.
        parts: where anything is divided, how many elements each of ``ranks`` has, one behind the other.
        span: where the parameters are divided, which Span alone uses them.
        is_spread: each of them keeps only its part of the sums.
        is_gathered: and of the parameters.
        is_kept: these stay whole from their gathering to the end of a run.
        kept: the elements that this rank keeps of the sums, from and to.
    """

    number: int
    params: list[SharedParam]
    numel: int
    ranks: tuple[int, ...]
    types: Types
    message: torch.dtype
    device: torch.device
    start: int
    parts: tuple[int, ...]
    span: int | None
    is_spread: bool
    is_gathered: bool
    is_kept: bool
    kept: tuple[int, int]

    def kept_of(self, start: int, numel: int) -> tuple[int, int]:
        """Of a parameter that begins at an element of the bucket, the elements that this rank keeps, from and to."""
        return within(self.kept, start, numel)

    @property
    def room(self) -> int:
        """Elements of all parts, up to where something else may start."""
        return aligned(max(self.numel, sum(self.parts)))

    @property
    def kept_room(self) -> int:
        """Likewise of what this rank keeps of the sums."""
        return self.room if not self.is_spread else aligned(self.kept[1] - self.kept[0])

    def placed(self) -> Iterator[tuple[SharedParam, int]]:
        """The parameters, and where each begins in the bucket."""
        start = 0
        for shared in self.params:
            yield shared, start
            start += shared.param.numel()


def own_buckets(
    facts: BucketsFacts, names: Sequence[str], shared: Sequence[SharedParam], sums: SumTypes, device: torch.device
) -> list[Bucket]:
    """The buckets of the parameters that this rank holds, in the order in which they are summed.

    Args:
        names: of the Graph's parameters.
        shared: the parameters that this rank holds.
        sums: in which types.
        device: where they will lie.

    Raises:
        RaNNCError: types of parameters have changed since the model was captured, not all alike.
    """
    here = {param.name: param for param in shared}
    buckets: list[Bucket] = []
    ends: dict[Types, int] = {}
    for number, found in enumerate(facts.buckets):
        params = [here[names[param]] for param in found.params if names[param] in here]
        if not params:
            continue
        dtype = params[0].param.dtype
        other = next((shared for shared in params if shared.param.dtype != dtype), None)
        if other is not None:
            raise RaNNCError(
                f'parameter "{other.name}" has type {other.param.dtype} and "{params[0].name}" {dtype}, which had one '
                "type when the model was captured; convert the model before it is wrapped"
            )
        numel = sum(shared.param.numel() for shared in params)
        ranks = facts.groups[found.group]
        types = sums.of_sums(dtype, len(ranks)), dtype
        start, message = ends.get(types, 0), sums.of_messages(dtype, len(ranks))
        kept = 0, numel
        if found.is_spread:
            place = ranks.index(process.get_rank())
            kept = sum(found.parts[:place]), sum(found.parts[: place + 1])
        divided = found.parts, found.span, found.is_spread, found.is_gathered, found.is_kept, kept
        made = Bucket(number, params, numel, ranks, types, message, device, start, *divided)
        buckets.append(made)
        ends[types] = start + made.kept_room
    return buckets


def within(run: tuple[int, int], start: int, numel: int) -> tuple[int, int]:
    """Of a parameter that begins at an element of a bucket, the elements that lie in a run of the bucket's."""
    first, end = (min(max(place - start, 0), numel) for place in run)
    return first, end


def aligned(numel: int) -> int:
    """As many elements or a few more: kernels and messages are fastest from places that are multiples of 16 bytes."""
    return -(-numel // _ALIGNED) * _ALIGNED


_ALIGNED = 16


def like(flat: Tensor, param: Tensor) -> Tensor:
    """``flat`` with the parameter's shape and, where it is dense, with its strides."""
    return flat.as_strided(param.size(), strides_of(param))


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Strides of the parameter's gradient: its own where it is dense."""
    if isinstance(param, Lacking) or torch.ops.aten.is_non_overlapping_and_dense(param):
        return param.stride()
    return torch.empty_like(param).stride()


def elements(tensor: Tensor, start: int, end: int) -> Tensor:
    """Elements of a tensor without gaps, as they lie in memory, which it shares."""
    return tensor.as_strided((end - start,), (1,), tensor.storage_offset() + start)


def elements_by(strides: tuple[int, ...], tensor: Tensor, start: int, end: int) -> Tensor:
    """Elements of a tensor as they lie with these strides, which leave no gaps; in its memory where it has these."""
    if tensor.stride() != strides:
        made = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
        tensor = made.copy_(tensor)
    return elements(tensor, start, end)
