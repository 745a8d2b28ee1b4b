"""Tensors of a model whose contents are not in this process."""

from __future__ import annotations

from torch import Tensor


class Lacking:
    """A base of classes of such tensors, which a capture sees without data."""

    def stand_in(self) -> Tensor:
        """A meta tensor of the same class of tensor, shape, strides and type."""
        raise NotImplementedError


def without_guard(tensor: Tensor) -> Tensor:
    """The tensor, or what stands for one whose contents are not here."""
    return tensor.stand_in() if isinstance(tensor, Lacking) else tensor
