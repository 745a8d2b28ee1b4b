"""Random numbers that depend neither on how the model was cut nor on how the batch was divided.

Each call has a key, which comes from torch's generator. With the drawing Op it chooses a stream of numbers, and the
place of an element in the global batch tells which of them it gets (``stream.py``). Ops that draw inside of a kernel
of torch (``draw.py`` says which) take them from the device's generator, which is set before each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from pyrannc.blocks import philox
from pyrannc.blocks.ahead import Ahead
from pyrannc.blocks.recorded import Place, RecordedDraws
from pyrannc.blocks.stream import CallKey, Draw, RowsInHand
from pyrannc.capture.nodes.chance import other_generators_restored, seed_others
from pyrannc.core.partition import RowDim
from pyrannc.core.program import Rows

_MASK = (1 << 64) - 1
# Rows in hand that are remembered: those of the microbatches of the usual row counts.
_REMEMBERED = 1024


def mix(*words: int) -> int:
    """A well-mixed 63-bit number from ``words`` (SplitMix64, Steele et al., OOPSLA 2014, chained)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def draw_key() -> int:
    """A number from torch's default generator, which moves on: as seeds, saved states and forks of it demand."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


class Randomness:
    """What a rank draws from.

    Args:
        device: where the rank computes.
        fused_dropout: attention with dropout stays one kernel, which draws from the device's generator.

    Attributes:
        placed: while code is traced, the Ops for which the generator would have been set, and whether by rows.
        noted: where a list is, it is told for what the generator is set.
    """

    def __init__(self, device: torch.device, *, fused_dropout: bool = True) -> None:
        self.device = device
        self.fused_dropout = fused_dropout
        self._generator = (
            torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        )
        self._remembered: dict[tuple[Rows, ...], RowsInHand] = {}
        self._one_row = RowsInHand([(0, 1)], device)
        # On the host nothing is gained by drawing masks together.
        self._ahead = None if device.type == "cpu" else Ahead(device)
        self.placed: list[tuple[int, bool]] | None = None
        self.noted: list[Place] | None = None
        self._recorded: RecordedDraws | None = None
        self.begin(0)
        self.at([])

    def begin(self, key: int) -> None:
        """Begins a call; ``key`` is the same on all ranks."""
        self._key = CallKey(key, self.device)

    @contextmanager
    def recorded(self, draws: RecordedDraws) -> Iterator[None]:
        """What runs inside is recorded as a CUDA graph, and draws from ``draws``."""
        before, own = self._key, self._generator.graphsafe_get_state()
        self._key, self._recorded = draws.key, draws
        try:
            yield
        finally:
            self._key, self._recorded = before, None
            self._generator.graphsafe_set_state(own)

    def begin_replay(self, draws: RecordedDraws, key: int | None = None) -> None:
        """What is replayed draws what the call would, or one with another key."""
        draws.begin(self._key.number if key is None else key, mix)

    def at(self, runs: Sequence[Rows]) -> None:
        """Says what the next Ops work on: these rows of the global batch."""
        known = tuple(runs)
        if known not in self._remembered:
            if len(self._remembered) >= _REMEMBERED:
                self._remembered.clear()
            self._remembered[known] = RowsInHand(known, self.device)
        self._rows = self._remembered[known]
        if self._recorded is not None:
            self._recorded.holds.append(self._rows)

    @property
    def _first_row(self) -> int:
        return self._rows.runs[0][0] if self._rows.runs else 0

    def draw(self, op: int, shape: Sequence[int], row_dim: RowDim | None, *, by_rows: bool) -> Draw:
        """What an Op draws now for a tensor.

        Args:
            op: the Op.
            shape: the tensor's.
            row_dim: the dimension that is proven to run over the batch.
            by_rows: without such a dimension, parts of the batch differ; else all of them get the same numbers.
        """
        if (
            row_dim is not None
            and row_dim.dim < len(shape)
            and shape[row_dim.dim] == self._rows.count * row_dim.per_row
        ):
            dim = row_dim.dim
            outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :])
            return Draw(self._key, op, 0, self._rows, outer, row_dim.per_row, inner)
        salt = 1 + self._first_row if by_rows else 0
        return Draw(self._key, op, salt, self._one_row, 1, 1, prod(shape))

    def again(self, draw: Draw, op: int) -> Draw:
        """What another Op draws now in the way of ``draw``, which was for as many rows."""
        rows, salt = (
            (self._one_row, draw.salt and 1 + self._first_row) if draw.rows is self._one_row else (self._rows, 0)
        )
        return draw._replace(key=self._key, op=op, salt=salt, rows=rows)

    def keep(self, draw: Draw, threshold: int) -> Tensor:
        """True where a word of a draw is at least ``threshold``, flat."""
        if self._ahead is None:
            return philox.keep(draw, threshold, self.device)
        return self._ahead.keep(draw, threshold)

    def drawn_ahead(self, who: Hashable) -> AbstractContextManager[None]:
        """Draws at once what ``who`` will ask for inside."""
        if self._ahead is None:
            return nullcontext()
        if self._recorded is not None:
            self._recorded.holds.append(self._ahead.known(who, self._rows))
        return self._ahead.drawn(who, self._key, self._rows)

    def words(self, draw: Draw) -> Tensor:
        """The words of a draw, flat."""
        return philox.words(draw, self.device)

    def placer(self, *, by_rows: bool, elsewhere: bool = False) -> Callable[[int], None]:
        """What generated code calls, with an Op's number, right before it draws from the device's generator.

        Args:
            by_rows: parts of the batch differ.
            elsewhere: it draws from those of Python and NumPy too.
        """
        return Placer(self, by_rows, elsewhere)

    def place(self, op: int, *, by_rows: bool, elsewhere: bool = False) -> None:
        """Sets the generators for the Op: for the rows in hand, or alike for all."""
        if self.placed is not None:
            self.placed.append((op, by_rows))
            return
        place = Place(op, 1 + self._first_row if by_rows else 0)
        if self._recorded is not None:
            self._recorded.place(self._generator, place)
            return
        if self.noted is not None:
            self.noted.append(place)
        seed = mix(self._key.number, *place)
        self._generator.manual_seed(seed)
        if elsewhere:
            seed_others(seed)

    @contextmanager
    def borrowed(self, *, others: bool = True) -> Iterator[None]:
        """Gives the generators back to the user as they were.

        Args:
            others: those of Python and NumPy, too. Other threads of the script that draw from them meanwhile would
                draw the same again.
        """
        state = self._generator.get_state()
        try:
            with other_generators_restored() if others else nullcontext():
                yield
        finally:
            self._generator.set_state(state)


@dataclass(eq=False)
class Placer:
    """A callable that generated code can name."""

    randomness: Randomness
    by_rows: bool
    elsewhere: bool

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = "place_generator"
        self.__module__ = __name__

    def __call__(self, op: int) -> None:
        """Sets the generators for the Op."""
        self.randomness.place(op, by_rows=self.by_rows, elsewhere=self.elsewhere)
