"""The covering array: rows of levels, few of them, in which any two levels of two factors meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How a job is divided.

    Attributes:
        rows: of each rank's batch of 8; its length is the number of ranks.
        stages: forced number of Stages; the Replicas are as even as the ranks allow.
        microbatches: forced number of microbatches.
    """

    rows: tuple[int, ...]
    stages: int
    microbatches: int

    @property
    def has_replicas(self) -> bool:
        """Some Stage has several ranks."""
        return len(self.rows) > self.stages

    def __str__(self) -> str:
        return f"{self.stages} Stages on rows {'+'.join(map(str, self.rows))} in {self.microbatches} microbatches"


@dataclass(frozen=True)
class Row:
    """A row of the array.

    Attributes:
        precision: name of a :class:`~tests.covering.precision.Precision`.
        zero: what Replicas divide, as ``enable_zero`` of the configuration says it.
        layout: Stages, ranks and microbatches.
        loss: ``"inside"`` of the model, or ``"outside"``.
        calls: calls of the model whose gradients add up before a step.
        clipping: greatest norm of the gradients; 0 is no limit.
    """

    precision: str
    zero: str
    layout: Layout
    loss: str
    calls: int
    clipping: float

    @property
    def environment(self) -> dict[str, str]:
        return {
            "RANNC_ENABLE_ZERO": self.zero,
            "RANNC_PARTITION_NUM": str(self.layout.stages),
            "RANNC_PIPELINE_NUM": str(self.layout.microbatches),
            # A second capture at the second call would take a third of the time.
            "RANNC_RECAPTURE_INTERVAL": "0",
        }

    def __str__(self) -> str:
        steps = f"{self.calls} calls a step{', clipped' if self.clipping else ''}"
        return f"{self.precision}, ZeRO {self.zero}, {self.layout}, loss {self.loss}, {steps}"


FACTORS: dict[str, tuple[Any, ...]] = {
    "precision": ("float32", "bfloat16 autocast", "float16 scaled", "bfloat16 parameters"),
    "zero": ("off", "1", "2", "3"),
    "layout": (
        Layout((5, 3), 1, 2),
        Layout((3, 3, 2), 2, 2),
        Layout((3, 1, 2, 2), 3, 4),
        Layout((3, 0, 5), 1, 3),
        Layout((7, 1), 2, 4),
        Layout((3, 3, 2), 3, 2),
    ),
    "loss": ("inside", "outside"),
    "calls": (1, 2),
    "clipping": (0.0, 0.1),
}
"""The levels of each factor of a :class:`Row`."""

assert list(FACTORS) == [field.name for field in fields(Row)]

Levels = tuple[Any, ...]
Pair = tuple[tuple[int, Any], tuple[int, Any]]


def possible(row: Row) -> bool:
    """False where Stages of one rank each would divide something: nothing is refused, but it is ZeRO 0 again."""
    return row.zero == "off" or row.layout.has_replicas


def pairs_of(levels: Levels) -> set[Pair]:
    """The levels of any two factors in a row."""
    return set(combinations(enumerate(levels), 2))


def covering(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Levels], bool]) -> list[Levels]:
    """Rows that together have every pair of levels that some allowed row has.

    Each row is one of those with most pairs that no row before it has, and of these the one whose levels, of factors
    with more than two, stand in fewest rows before: the first few rows differ as much as so few can.
    """
    candidates = {levels: pairs_of(levels) for levels in product(*factors.values()) if allowed(levels)}
    missing = set().union(*candidates.values())
    several = [number for number, levels in enumerate(factors.values()) if len(levels) > 2]
    rows: list[Levels] = []

    def gain(levels: Levels) -> tuple[int, int]:
        used = sum(row[number] == levels[number] for row in rows for number in several)
        return len(candidates[levels] & missing), -used

    while missing:
        rows.append(max(candidates, key=gain))
        missing -= candidates[rows[-1]]
    return rows


ROWS = [Row(*levels) for levels in covering(FACTORS, lambda levels: possible(Row(*levels)))]
"""The array."""
