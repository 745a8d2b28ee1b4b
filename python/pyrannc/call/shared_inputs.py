"""Input tensors that the forward changes in place and that are given twice: in the captured call they are two."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from pyrannc.errors import InputError


def refuse_shared(tensors: Sequence[Tensor], changed: Collection[int]) -> None:
    """Raises InputError where one that the forward changes begins where another one does."""
    for place in changed:
        for other, tensor in enumerate(tensors):
            if other != place and tensor.numel() and tensor.data_ptr() == tensors[place].data_ptr() != 0:
                raise InputError(
                    f"the forward changes tensor {place} of the arguments in place (shape {tuple(tensor.shape)}), and "
                    f"tensor {other} is the same memory: pass a copy of one of them (x.clone()), or let the forward "
                    "compute with a new tensor (x = x + y instead of x += y)"
                )
