"""Precisions: in which types a script keeps its parameters and computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Precision:
    """How a script trains.

    Attributes:
        params: type of parameters and inputs.
        autocast: type that `torch.autocast` computes in, if any.
        scaled: the script uses a `GradScaler`.
        exact: the same numbers in float64, without any rounding.
    """

    params: torch.dtype
    autocast: torch.dtype | None = None
    scaled: bool = False
    exact: bool = False

    def region(self) -> AbstractContextManager[Any]:
        """Where the script computes a loss."""
        if self.autocast is None or self.exact:
            return nullcontext()
        return torch.autocast("cpu", dtype=self.autocast)

    def scaler(self) -> torch.amp.GradScaler:
        """One that grows within a few steps; it does nothing where numbers are not scaled."""
        return torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2, enabled=self.scaled)

    def kept(self, value: Any) -> Any:
        """The floating-point tensors of a structure as parameters or inputs are."""
        return pytree.tree_map_only(Tensor, lambda item: self._converted(item), value)

    def _converted(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        rounded = tensor.to(self.params)
        return rounded.double() if self.exact else rounded

    @property
    def rounding(self) -> float:
        """Distance from 1 to the next number of the narrowest type that is computed in, halved."""
        return torch.finfo(self.autocast or self.params).eps / 2

    @property
    def truth(self) -> Precision:
        """The exact numbers that this precision rounds."""
        return replace(self, exact=True)


PRECISIONS = {
    "float32": Precision(torch.float32),
    "bfloat16 autocast": Precision(torch.float32, autocast=torch.bfloat16),
    "float16 scaled": Precision(torch.float32, autocast=torch.float16, scaled=True),
    "bfloat16 parameters": Precision(torch.bfloat16),
}
"""By the name of the level."""
