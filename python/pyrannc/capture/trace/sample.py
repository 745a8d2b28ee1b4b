"""The call of a model that is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.user.flatten import Structure, by_extents, flatten


@dataclass(frozen=True)
class Sample:
    """A call that stands for those with other rows.

    Attributes:
        model: what is called, in training or evaluation mode; it may have meta parameters.
        args: positional arguments.
        kwargs: keyword arguments.
        device: where the model will run; it need not exist here.
        rows: batch size of the call.
        per_row: for each tensor of the arguments, how many elements of its dimension 0 each row has; 0: none.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    rows: int
    per_row: tuple[int, ...]

    @staticmethod
    def of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device, rows: int) -> Sample:
        """Tensors that have ``rows`` as dimension 0 have one element for each row."""
        per_row = by_extents(flatten((tuple(args), kwargs))[0], rows)
        return Sample(model, tuple(args), kwargs, device, rows, per_row)

    def flat(self) -> tuple[list[Tensor], Structure]:
        """The tensors of the arguments, and the structure without them."""
        return flatten((self.args, self.kwargs))
