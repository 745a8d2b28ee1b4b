"""Calls recorded as a CUDA graph, to be timed as parts of replayed steps are."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.recorded import Place, RecordedDraws
from pyrannc.capture.torch_internals.graphs import Graph


class Recorded:
    """Calls as a CUDA graph, recorded on the current stream.

    Args:
        call: what is recorded.
        calls: so many times.
        randomness: from where it draws.

    Raises:
        Exception: it cannot be recorded.
    """

    def __init__(self, call: Callable[[], object], calls: int, randomness: Randomness) -> None:
        self._graph = Graph()
        # The graph draws from generators that live in these.
        self._draws = RecordedDraws(_places(call, randomness) * calls, randomness.device)
        self._draws.register(self._graph)
        stream = torch.cuda.current_stream(randomness.device)
        try:
            with (
                randomness.recorded(self._draws),
                warnings.catch_warnings(),
                torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
            ):
                # A call without kernels is worth no warning.
                warnings.simplefilter("ignore")
                for _ in range(calls):
                    call()
        except Exception:
            # Where a recording cannot begin, torch stays on its stream.
            torch.cuda.set_stream(stream)
            raise
        randomness.begin_replay(self._draws)

    def replay(self) -> None:
        """Runs the calls."""
        self._graph.replay()


def _places(call: Callable[[], object], randomness: Randomness) -> list[Place]:
    """For what a call sets the device's generator."""
    before, randomness.noted = randomness.noted, []
    try:
        call()
        return randomness.noted
    finally:
        randomness.noted = before
