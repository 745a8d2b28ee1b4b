"""What a run that is recorded as a CUDA graph draws from, so that a replay draws what the run itself would have.

Kernels of this project read the call's key on the device. Kernels of torch draw from the device's generator: each of
their Ops gets a generator of its own in the recording, which is seeded before each replay as the device's would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pyrannc.blocks.stream import CallKey


class Place(NamedTuple):
    """For what the generator is set: an Op, and the rows in hand (0: alike for all)."""

    op: int
    salt: int


class RecordedDraws:
    """The key and the generators of one recording.

    Args:
        places: for what the generator is set in the run, in this order.
        device: where it draws.

    Attributes:
        key: the call's, which changes with each replay.
        holds: what kernels of the recording read.
    """

    def __init__(self, places: Sequence[Place], device: torch.device) -> None:
        self.key = CallKey(0, device)
        self.key.begin(0)
        self.holds: list[object] = []
        self._places = tuple(places)
        self._generators = [torch.Generator(device=device) for _ in places]
        self._passed = 0

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Says, before the recording, which generators it will draw from."""
        for generator in self._generators:
            graph.register_generator_state(generator)

    def place(self, generator: torch.Generator, place: Place) -> None:
        """In the recording: what the device's generator draws next is drawn from the Op's own."""
        if self._passed == len(self._places) or self._places[self._passed] != place:
            raise RuntimeError(f"Op {place.op} draws in another order than in the run before")
        generator.graphsafe_set_state(self._generators[self._passed])
        self._passed += 1

    def begin(self, number: int, seed_of: Callable[..., int]) -> None:
        """Before a replay.

        Args:
            number: drawn for the call.
            seed_of: the seed for a place of a call.
        """
        if number != self.key.number:
            self.key.begin(number)
        for generator, place in zip(self._generators, self._places, strict=True):
            generator.manual_seed(seed_of(number, *place))
