"""The judge finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .habit import Habit
from .job import Job, Note
from .judging import judge
from .running import Run
from .settings import STAGES


def script(job: Job) -> None:
    """Nothing."""


EQUAL = Habit(script, "equal", (STAGES,))
WARNED = replace(EQUAL, says=("take care",))
REFUSED = Habit(script, "refused", (STAGES,), "InputError", ("x", "do y"))

LOSS: Note = ("loss", "same", torch.tensor(2.0, dtype=torch.float64))
WRONG: Note = ("loss", "same", torch.tensor(2.0 + 1e-6, dtype=torch.float64))
ROWS: Note = ("output", "rows", torch.arange(4.0))
PARTS: tuple[Note, Note] = (("output", "rows", torch.arange(1.0)), ("output", "rows", torch.arange(1.0, 4.0)))
PLANS = ((2, 1),)

RIGHT = [Run([LOSS, PARTS[0]], plans=PLANS), Run([LOSS, PARTS[1]], plans=PLANS)]
ERROR = Run([LOSS], ("InputError", "x is wrong; do y"))
OTHER = Run([LOSS], ("MismatchError", "rank 0: x is wrong; do y"))


@pytest.mark.parametrize(
    ("habit", "ranks"),
    [
        (EQUAL, RIGHT),
        (WARNED, [RIGHT[0], replace(RIGHT[1], told=("now take care!",))]),
        (REFUSED, [ERROR, OTHER]),
        (REFUSED, [replace(OTHER, notes=[]), ERROR]),
    ],
)
def test_what_is_right(habit: Habit, ranks: list[Run]) -> None:
    assert judge(habit, STAGES, ranks, [LOSS, ROWS]) == []


@pytest.mark.parametrize(
    ("habit", "ranks", "text"),
    [
        (EQUAL, [RIGHT[0], replace(RIGHT[1], notes=[WRONG, PARTS[1]])], "loss on rank 1, leaf 0: differs by 1e-06"),
        (EQUAL, [RIGHT[1], RIGHT[0]], "note 1, output, leaf 0: differs by 3"),
        (EQUAL, [RIGHT[0], replace(RIGHT[1], notes=[LOSS])], "[2, 1] notes instead of 2"),
        (EQUAL, [replace(run, notes=[]) for run in RIGHT], "[0, 0] notes instead of 2"),
        (EQUAL, [RIGHT[0], replace(RIGHT[1], notes=[("norm", "same", LOSS[2]), PARTS[1]])], "instead of loss"),
        (EQUAL, [RIGHT[0], ERROR], "rank 1 ended with InputError: x is wrong; do y"),
        (EQUAL, [replace(run, plans=((1, 1),)) for run in RIGHT], "the Plan has 1 Stages and 1 microbatches"),
        (WARNED, RIGHT, "no warning says ('take care',)"),
        (REFUSED, [ERROR, replace(ERROR, error=None)], "rank 1 went on without an error"),
        (REFUSED, [OTHER, OTHER], "no rank raised InputError"),
        (REFUSED, [ERROR, replace(ERROR, error=("InputError", "x is wrong"))], "lacks 'do y'"),
        (REFUSED, [ERROR, replace(ERROR, notes=[WRONG])], "loss on rank 1, leaf 0: differs by 1e-06"),
    ],
)
def test_what_is_wrong(habit: Habit, ranks: list[Run], text: str) -> None:
    found = judge(habit, STAGES, ranks, [LOSS, ROWS])
    assert len(found) == 1
    assert text in found[0]
