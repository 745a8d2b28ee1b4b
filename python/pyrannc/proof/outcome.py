"""What a call and its backward come to, in one form for one process and for many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyrannc.call.variant import Variant


@dataclass
class Outcome:
    """A training call of the global batch, on the host.

    Attributes:
        values: what Stages give each other, by Value of the body.
        outputs: the distinct outputs of the call, by Value of the whole.
        buffers: their contents afterwards, by name.
        gradients: by first name of the parameter; ``None`` for one that gets none.
    """

    values: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def seeds(variant: Variant, total_rows: int) -> dict[int, Tensor]:
    """The gradients with which the backward begins, for all rows, by Value of the whole: 1 for the loss, else noise."""
    facts = variant.whole.facts
    if variant.loss is not None:
        return {variant.loss: torch.ones((), dtype=facts.values[variant.loss].dtype, device="cpu")}
    made = [value for value in dict.fromkeys(facts.outputs) if facts.values[value].requires_grad]
    return {value: _noise(facts.values[value].shape_at(total_rows), facts.values[value].dtype, value) for value in made}


def _noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(list(shape), generator=generator, dtype=torch.float64, device="cpu").to(dtype)
