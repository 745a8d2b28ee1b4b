"""Ranks tell each other whose gradients are not finite, so that a ``GradScaler`` decides alike on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import ModuleType

import torch
from torch import Tensor

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job.exchange import sum_over_ranks
from pyrannc.store.spread_tensor import own_piece

_TILE = 1 << 15
"""Elements that one program of the kernel looks at."""
_MOST_KEPT = 4
"""Of the tiles of one type: where a script holds gradients, steps take turns with two places for them."""

_device_and_layout: Callable[[Tensor], tuple[torch.device, torch.layout]] = attrgetter("device", "layout")


class Overflow:
    """Finds out which gradients of a model are not finite."""

    def __init__(self) -> None:
        self._tiles: dict[torch.dtype, list[_Tiles]] = {}

    @torch.no_grad()
    def share(self, params: Sequence[Tensor | None], listed: Tensor) -> tuple[Tensor, Tensor]:
        """Finds out whose gradients have what is not finite on some rank. All ranks call it; the host waits for none.

        Each parameter is judged by itself: nobody knows yet which optimizer will step it.

        Args:
            params: as many on all ranks; those of other ranks are None.
            listed: 1-D float32, on this rank's device: 1 for those that the model's optimizer lists here, else 0.

        Returns:
            (3, parameters): where a gradient has NaN, infinity, or minus infinity on some rank; and what the optimizer
            lists on some rank.
        """
        with DisableTorchFunctionSubclass():
            grads = [None if param is None else param.grad for param in params]
        own = [None if grad is None else own_piece(grad) for grad in grads]
        both = torch.cat([self._kinds(own, listed.device), listed[None]])
        sum_over_ranks(both)
        anywhere = both > 0
        return anywhere[:3], anywhere[3]

    def _kinds(self, grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """(3, gradients) float32: 1 where one has NaN, infinity, or minus infinity, else 0."""
        found = torch.zeros(3, len(grads), device=device)
        kinds: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        for place, grad in enumerate(grads):
            if grad is not None and grad.numel():
                places, present = kinds.setdefault(grad.dtype, ([], []))
                places.append(place)
                present.append(grad)
        for dtype, (places, present) in kinds.items():
            kernels = _kernels(dtype, device)
            if kernels is not None and _lie_without_gaps(present, device):
                kernels.judge(*self._tiles_of(dtype, places, present).tensors, found, dtype, _TILE)
            else:
                _put(places, torch.stack([_kinds_of(grad).to(device) for grad in present], 1), found)
        return found

    def _tiles_of(self, dtype: torch.dtype, places: list[int], grads: list[Tensor]) -> _Tiles:
        """Those of gradients, which nearly always lie where they lay in one of the steps before."""
        lie = [grad.data_ptr() for grad in grads], [grad.numel() for grad in grads]
        kept = self._tiles.setdefault(dtype, [])
        tiles = next((tiles for tiles in kept if (tiles.lie, tiles.places) == (lie, places)), None)
        if tiles is None:
            tiles = _Tiles.of(places, lie, dtype.itemsize, grads[0].device)
            kept[:] = [tiles, *kept[: _MOST_KEPT - 1]]
        return tiles


@dataclass(frozen=True)
class _Tiles:
    """Gradients of one type, divided for the kernel.

    Attributes:
        places: of the gradients among the parameters.
        lie: their addresses, and their numbers of elements.
        tensors: of each tile its address, its number of elements, and the place of its gradient: on the device.
    """

    places: list[int]
    lie: tuple[list[int], list[int]]
    tensors: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, places: list[int], lie: tuple[list[int], list[int]], itemsize: int, device: torch.device) -> _Tiles:
        addresses, sizes = (torch.tensor(numbers, device="cpu") for numbers in lie)
        counts = (sizes + _TILE - 1) // _TILE
        of_tile = torch.repeat_interleave(counts)
        start = (torch.arange(len(of_tile), device="cpu") - (counts.cumsum(0) - counts)[of_tile]) * _TILE
        rows = (
            addresses[of_tile] + start * itemsize,
            (sizes[of_tile] - start).clamp(max=_TILE),
            torch.tensor(places, device="cpu")[of_tile],
        )
        found = torch.stack(rows)
        if device.type != "cpu":
            # The host may be far ahead of the device, and does not wait for it.
            found = found.pin_memory().to(device, non_blocking=True)
        address, size, place = found
        return cls(places, lie, (address, size, place))


def _kinds_of(grad: Tensor) -> Tensor:
    """(3,) float32: 1 where it has NaN, infinity, or minus infinity, else 0, for torch's kernel that unscales.

    On CUDA it looks at float64 as float32.
    """
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    if real.is_cuda:
        real = real.float()
    return torch.stack([real.isnan().any(), (real == torch.inf).any(), (real == -torch.inf).any()]).float()


def _lie_without_gaps(grads: Sequence[Tensor], device: torch.device) -> bool:
    """True where each has memory of its own on the device, and is all of it."""
    if set(map(_device_and_layout, grads)) != {(device, torch.strided)} or not all(map(Tensor.data_ptr, grads)):
        return False
    return all(map(Tensor.is_contiguous, grads)) or all(map(torch.ops.aten.is_non_overlapping_and_dense, grads))


@cache
def _kernels(dtype: torch.dtype, device: torch.device) -> ModuleType | None:
    """The Triton kernel; None where Triton, what it compiles with, or the type is missing."""
    if device.type != "cuda" or not dtype.is_floating_point:
        return None
    try:
        from pyrannc.store import overflow_triton

        sample = torch.zeros(1, dtype=dtype, device=device)
        found = torch.zeros(3, 1, dtype=torch.float32, device=device)
        tiles = _Tiles.of([0], ([sample.data_ptr()], [1]), dtype.itemsize, device)
        overflow_triton.judge(*tiles.tensors, found, dtype, _TILE)
    except Exception:  # a missing compiler shows in many ways, and this is only faster
        return None
    return overflow_triton


def _put(places: Sequence[int], flags: Tensor, found: Tensor) -> None:
    """Puts columns at increasing places, by runs of them: an index would have to travel to the device."""
    first = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            found[:, places[first] : places[first] + end - first] = flags[:, first:end]
            first = end
