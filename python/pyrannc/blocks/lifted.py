"""What a Span draws, as tensors that come in: compiled code cannot ask which rows of the batch it works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyrannc.blocks import philox
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.stream import Draw


@dataclass
class Lifted:
    """What a function draws, in order; its Ops have the numbers 0, 1 and so on.

    Attributes:
        draws: words, or with a threshold masks.
        placed: Ops that draw from the device's generator, and whether by rows.
    """

    draws: list[tuple[Draw, int | None]] = field(default_factory=list)
    placed: list[tuple[int, bool]] = field(default_factory=list)

    @contextmanager
    def noted(self, randomness: Randomness) -> Iterator[None]:
        """Notes what is drawn inside, where tensors have no data."""

        def source(draw: Draw, threshold: int | None) -> Tensor:
            self.draws.append((draw, threshold))
            return self._like(draw, threshold, randomness.device)

        with philox.drawn_by(source), _placing(randomness, self.placed):
            yield

    @contextmanager
    def given(self, randomness: Randomness, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these are drawn; the generator stays as it is."""
        coming = iter(tensors)
        with philox.drawn_by(lambda *_: next(coming)), _placing(randomness, []):
            yield

    def empty(self, device: torch.device) -> list[Tensor]:
        """Tensors like those that are drawn."""
        return [self._like(draw, threshold, device) for draw, threshold in self.draws]

    def draw(self, randomness: Randomness, numbers: Sequence[int]) -> list[Tensor]:
        """What is drawn now by Ops with these numbers, of which one may draw from the generator afterwards."""
        drawn = []
        for draw, threshold in self.draws:
            again = randomness.again(draw, numbers[draw.op])
            drawn.append(randomness.words(again) if threshold is None else randomness.keep(again, threshold))
        for op, by_rows in self.placed:
            randomness.place(numbers[op], by_rows=by_rows)
        return drawn

    @staticmethod
    def _like(draw: Draw, threshold: int | None, device: torch.device) -> Tensor:
        return torch.empty(draw.numel, dtype=torch.int32 if threshold is None else torch.bool, device=device)


@contextmanager
def _placing(randomness: Randomness, placed: list[tuple[int, bool]]) -> Iterator[None]:
    before, randomness.placed = randomness.placed, placed
    try:
        yield
    finally:
        randomness.placed = before
