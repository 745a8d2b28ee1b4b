"""Structures of tensors on their way between ranks, one after another, each only to those who need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import is_dense, pytree
from pyrannc.errors import InputError
from pyrannc.job import agree, faults, process
from pyrannc.job.exchange import exchange, give_to_others


@dataclass(frozen=True)
class Route:
    """Who has a structure, and who gets it.

    Attributes:
        key: its number.
        source: the rank that has it.
        receivers: the ranks that get it; the source may be one of them.
    """

    key: int
    source: int
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class _Hole:
    """The place of a tensor in a structure that travels without; ``stride`` where its memory has no gaps."""

    shape: torch.Size
    stride: tuple[int, ...] | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def carry(own: Mapping[int, Any], routes: Sequence[Route], device: torch.device) -> dict[int, Any]:
    """The structures that this rank gets, by key, with copies of their tensors on the host. All ranks call it.

    A rank has no more than one structure at once in flight. Structures without tensors travel all together.

    Args:
        own: what this rank has; without a key, there is nothing to give.
        routes: the same on all ranks.
        device: where this rank computes, over which tensors travel.

    Raises:
        InputError: a tensor is sparse, or of another kind that has no plain memory.
    """
    rank = process.get_rank()
    given = {route.key: own[route.key] for route in routes if route.source == rank and route.key in own}
    frames: list[dict[int, Any]] = agree.gather_objects(agree.together(lambda: _framed(given)))
    found = {}
    for route in routes:
        if route.key not in frames[route.source]:
            continue
        frame = frames[route.source][route.key]
        tensors = [leaf for leaf in pytree.tree_leaves(given.get(route.key)) if isinstance(leaf, Tensor)]
        arrived = _carry_one(tensors, [leaf for leaf in pytree.tree_leaves(frame) if _is_hole(leaf)], route, device)
        faults.advance()
        if rank in route.receivers:
            found[route.key] = _filled(frame, arrived)
    return found


def _framed(given: Mapping[int, Any]) -> dict[int, Any]:
    return {key: pytree.tree_map(_emptied, structure) for key, structure in given.items()}


def _emptied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout != torch.strided or type(leaf) not in (Tensor, torch.nn.Parameter):
        raise InputError(
            f"a {type(leaf).__name__} of layout {leaf.layout} in the optimizer's state cannot be given to other ranks; "
            "force one Stage with RANNC_PARTITION_NUM=1"
        )
    return _Hole(leaf.shape, leaf.stride() if is_dense(leaf) else None, leaf.dtype)


def _is_hole(leaf: Any) -> bool:
    return isinstance(leaf, _Hole)


def _filled(frame: Any, tensors: Sequence[Tensor]) -> Any:
    rest = iter(tensors)
    return pytree.tree_map(lambda leaf: next(rest) if _is_hole(leaf) else leaf, frame)


def _carry_one(tensors: Sequence[Tensor], holes: Sequence[_Hole], route: Route, device: torch.device) -> list[Tensor]:
    """The tensors of one structure on the host of those who get it, as one message."""
    rank, everyone = process.get_rank(), set(process.all_ranks())
    others = [receiver for receiver in route.receivers if receiver != route.source]
    if rank != route.source and rank not in others:
        return []
    if rank == route.source and not others:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    size = sum(hole.nbytes for hole in holes)
    packed = torch.empty(size, dtype=torch.uint8, device=device)
    if rank == route.source:
        packed = torch.cat([packed[:0], *(_bytes_of(tensor.to(device)) for tensor in tensors)])
    if size and {*others, route.source} == everyone:
        give_to_others(packed, route.source)
    elif size and rank == route.source:
        exchange([(receiver, packed) for receiver in others], [])
    elif size:
        exchange([], [(route.source, packed)])
    return _unpacked(packed.cpu(), holes)


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach()
    flat = flat.as_strided((flat.numel(),), (1,)) if is_dense(flat) else flat.contiguous().view(-1)
    return flat.view(torch.uint8)


def _unpacked(packed: Tensor, holes: Sequence[_Hole]) -> list[Tensor]:
    found = []
    start = 0
    for hole in holes:
        # A copy has memory of its own, at an address that any type may have.
        flat = packed[start : start + hole.nbytes].clone().view(hole.dtype)
        found.append(flat.view(hole.shape) if hole.stride is None else flat.as_strided(hole.shape, hole.stride))
        start += hole.nbytes
    return found
