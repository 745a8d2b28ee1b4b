"""Random numbers that do not depend on how the model was cut.

Before each Op that draws, the device's generator is set to a seed made from the run's seed, the
step, the first row in hand and the Op. So the same rows draw the same numbers whichever Stage, rank or
order computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A well-mixed 63-bit number from ``words`` (SplitMix64, Steele et al., OOPSLA 2014, chained)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class Randomness:
    """The generator of one rank.

    Args:
        device: whose default generator the model draws from.
        seed: the run's seed, equal on all ranks.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = (
            torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        )
        self._seed = seed
        self._key = 0

    def at(self, step: int, microbatch: int, row: int) -> None:
        """Says what the next Ops work on: the rows of a microbatch that begin with ``row``."""
        self._key = mix(self._seed, step, microbatch, row)

    def placer(self, op: int) -> Callable[[], None]:
        """What a Stage calls right before the Op draws."""
        return _Placer(self, op)

    def place(self, op: int) -> None:
        """Sets the generator for the Op."""
        self._generator.manual_seed(mix(self._key, op))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Gives the generator back to the user as it was."""
        state = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(state)


@dataclass(eq=False)
class _Placer:
    """A callable that generated code can name."""

    randomness: Randomness
    op: int

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = f"place_generator_{self.op}"
        self.__module__ = __name__

    def __call__(self) -> None:
        self.randomness.place(self.op)
