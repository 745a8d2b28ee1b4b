"""Habits under the rows of a covering array of precisions, ZeRO, Stages, losses, accumulation and clipping.

In float64 all numbers are those of one process. In a lower precision they are at most twice as far from the truth as
those of one process in the same precision. Four rows; ``COVERING=all`` tries all.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.ranks import RankFailed, RankPool

from .array import ROWS, Row
from .habits import HABITS
from .judging import Error, differences, errors, together, unlike, worse, worse_kinds
from .precision import PRECISIONS, Precision
from .running import run_plain, run_rank

_TIMEOUT_S = 300
_TRIED = ROWS if os.environ.get("COVERING") == "all" else ROWS[:4]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("row", _TRIED, ids=str)
def test_habits(row: Row, ranks: Callable[[int], RankPool]) -> None:
    precision, pool = PRECISIONS[row.precision], ranks(len(row.layout.rows))
    wrong: dict[str, list[str]] = {}
    by_habit: dict[str, dict[str, Error]] = {}
    for name in HABITS:
        try:
            if row.precision == "float32":
                wrong[f"{name} in float64"] = _exactly(pool, name, row, precision.truth)
            wrong[name], by_habit[name] = _as_near(pool, name, row, precision)
        except RankFailed as failure:
            wrong[name] = [str(failure)]
    wrong["all"] = worse_kinds(by_habit.values())
    assert {name: found for name, found in wrong.items() if found} == {}


def _exactly(pool: RankPool, name: str, row: Row, precision: Precision) -> list[str]:
    """What is not as in one process."""
    runs = pool.run(run_rank, name, row, precision, env=row.environment, timeout_s=_TIMEOUT_S)
    got, found = together([run.notes for run in runs])
    return runs[0].wrong + found + differences(got, run_plain(name, row, precision))


def _as_near(pool: RankPool, name: str, row: Row, precision: Precision) -> tuple[list[str], dict[str, Error]]:
    """What is further from the truth than in one process, and how far all is."""
    runs = pool.run(run_rank, name, row, precision, env=row.environment, timeout_s=_TIMEOUT_S)
    got, found = together([run.notes for run in runs])
    plain, truth = run_plain(name, row, precision), run_plain(name, row, precision.truth)
    found += unlike(got, plain)
    if found:
        return runs[0].wrong + found, {}
    by_name = errors(got, plain, truth)
    return runs[0].wrong + worse(by_name, precision.rounding), by_name
