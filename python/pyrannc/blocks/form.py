"""For what a Span is compiled: tensors of given shapes and layouts, and which of its results get gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Meta(NamedTuple):
    """What compiled code takes for granted of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> Meta:
        """That of a tensor, which may be fake."""
        return Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Such a tensor, a leaf of autograd."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Form:
    """For what a Span is compiled.

    Attributes:
        rows: of the batch.
        trains: autograd is on.
        takes: what comes in.
        wanted: by what the Span gives, whether a gradient comes back for it.
        may_wait: by what comes in, whether its gradient may come later than those that other Spans wait for.
    """

    rows: int
    trains: bool
    takes: tuple[Meta, ...]
    wanted: tuple[bool, ...]
    may_wait: tuple[bool, ...]
