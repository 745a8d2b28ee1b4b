"""What a Span draws, as tensors that come in: compiled code cannot ask which rows of the batch it works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyrannc.blocks import philox
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.stream import Draw
from pyrannc.capture.nodes.draws import call_draws
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode


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
        """What is drawn now by Ops with these numbers, but from the device's generator."""
        drawn = []
        for draw, threshold in self.draws:
            again = randomness.again(draw, numbers[draw.op])
            drawn.append(randomness.words(again) if threshold is None else randomness.keep(again, threshold))
        return drawn

    def placing(self, randomness: Randomness, numbers: Sequence[int]) -> AbstractContextManager[object]:
        """Inside, each Op that draws from the device's generator finds it set for itself; they come in their order."""
        if len(self.placed) > 1:
            return _InTurn([partial(randomness.place, numbers[op], by_rows=by_rows) for op, by_rows in self.placed])
        for op, by_rows in self.placed:
            randomness.place(numbers[op], by_rows=by_rows)
        return nullcontext()

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


class _InTurn(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Compiled code calls each operator that draws from a generator by itself, so that it can be set before.

    Args:
        places: set it, in the order of the operators.
    """

    def __init__(self, places: Sequence[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._places = places
        self._passed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call_draws(func, args, kwargs or {}):
            if self._passed == len(self._places):
                raise RuntimeError(f"{func} draws from the generator, which no Op does here")
            self._places[self._passed]()
            self._passed += 1
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # likewise
        if error is None and self._passed < len(self._places):
            raise RuntimeError(f"{self._passed} of {len(self._places)} Ops have drawn from the generator")
