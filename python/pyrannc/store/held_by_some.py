"""Parameters, buffers and gradients that this rank has and others have not: not all of them can send or receive one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job import process


class Holds(Protocol):
    """What knows which ranks hold a model's parameters and buffers."""

    holders: Mapping[str, tuple[int, ...]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All of them by first name."""
        ...


class HeldBySome(NamedTuple):
    """Which parameter or buffer something is, or is the gradient of."""

    name: str
    ranks: tuple[int, ...]
    is_gradient: bool


_models: WeakSet[Holds] = WeakSet()


def note_holders(model: Holds) -> None:
    """A model is spread over the ranks."""
    if any(len(ranks) < process.get_world_size() for ranks in model.holders.values()):
        _models.add(model)


def forget_holders(model: Holds) -> None:
    """Every rank has the whole model again."""
    _models.discard(model)


def held_by_some(tensor: Tensor) -> HeldBySome | None:
    """What a tensor begins in, of what only some ranks hold."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    place, rank, everyone = tensor.data_ptr(), process.get_rank(), process.get_world_size()
    with DisableTorchFunctionSubclass():
        for model in _models:
            for name, own in model.tensors():
                ranks = model.holders.get(name, ())
                if rank in ranks and len(ranks) < everyone:
                    for candidate in (own, own.grad):
                        if candidate is not None and _is_inside(place, candidate):
                            return HeldBySome(name, ranks, candidate is not own)
    return None


def _is_inside(place: int, tensor: Tensor) -> bool:
    start = tensor.data_ptr()
    return start <= place < start + tensor.nbytes
