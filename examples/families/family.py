"""What a family of models is: its sizes, a model of them, and made-up data to train it on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

IGNORED = -100
"""The label of tokens that are not predicted."""
MASKED_SHARE = 0.15

Row = dict[str, Tensor]
"""Named arguments of the model for one row of a batch."""


@dataclass(frozen=True)
class Family(ABC):
    """The sizes of a model, each an option of the command line; by default tiny.

    Dropout is off, so that runs can be compared.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """A model with random weights whose output has its loss as ``output["loss"]``.

        It imports what it is made of: a start waits for one family's definition only.
        """

    @abstractmethod
    def row(self, generator: Generator) -> Row:
        """One row, drawn from the generator."""


def draw_tokens(count: int, vocabulary: int, generator: Generator) -> Tensor:
    """Tokens: all but 0, which pads, and 1, which hides others."""
    return torch.randint(2, vocabulary, (count,), generator=generator)


def mask_tokens(tokens: Tensor, generator: Generator) -> Row:
    """Hides some tokens, equally many in every row, and gives them as labels."""
    places = torch.randperm(len(tokens), generator=generator)[: max(1, round(MASKED_SHARE * len(tokens)))]
    return {
        "input_ids": tokens.index_fill(0, places, 1),
        "labels": torch.full_like(tokens, IGNORED).index_copy(0, places, tokens[places]),
    }
