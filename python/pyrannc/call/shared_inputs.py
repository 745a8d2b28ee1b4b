"""Input tensors that the forward changes in place and that share memory: in the captured call none do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pyrannc.errors import InputError


def refuse_shared(tensors: Sequence[Tensor], changed: Collection[int]) -> None:
    """Raises InputError where one that the forward changes has elements of another one."""
    for place in changed:
        for other, tensor in enumerate(tensors):
            if other != place and _overlap(tensors[place], tensor):
                raise InputError(
                    f"the forward changes tensor {place} of the arguments in place (shape "
                    f"{tuple(tensors[place].shape)}), and tensor {other} has elements in the same memory: pass a copy "
                    "of one of them (x.clone()), or let the forward compute with a new tensor (x = x + y instead of "
                    "x += y)"
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True when some element is one of both."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if not (one.numel() and other.numel()) or max(_first(one), _first(other)) >= min(_end(one), _end(other)):
        return False
    if one.element_size() != other.element_size():
        return True
    start = min(one.storage_offset(), other.storage_offset())
    elements = (max(_end(one), _end(other)) - min(_first(one), _first(other))) // one.element_size()
    taken = torch.zeros(elements, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset() - start).any())


def _first(tensor: Tensor) -> int:
    """Where its memory begins, in bytes from that of its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _end(tensor: Tensor) -> int:
    """Where its last element ends."""
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return _first(tensor) + (steps + 1) * tensor.element_size()
