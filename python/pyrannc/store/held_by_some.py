"""Parameters, buffers and gradients that this rank has and others have not: not all of them can send or receive one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pyrannc.capture.reads.lacking import Lacking
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
    """With what a tensor begins, of what only some ranks hold."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return None
    place, everyone = tensor.data_ptr(), process.get_world_size()
    with DisableTorchFunctionSubclass():
        for model in _models:
            for name, own in model.tensors():
                is_own = _begins_at(own, place)
                if is_own or _begins_at(own.grad, place):
                    ranks = model.holders.get(name, ())
                    return HeldBySome(name, ranks, not is_own) if 0 < len(ranks) < everyone else None
    return None


def _begins_at(tensor: Tensor | None, place: int) -> bool:
    return tensor is not None and not isinstance(tensor, Lacking) and tensor.data_ptr() == place
