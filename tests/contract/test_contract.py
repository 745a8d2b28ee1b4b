"""Habits of users come to what one process would compute, or to an error that says why not."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.ranks import RankFailed, RankPool, run_programs

from .habits import HABITS
from .job import Note
from .judging import joined, judge
from .running import Run, run_plain, run_rank
from .settings import Setting, tried

Ranks = Callable[[int], RankPool]


@cache
def plain(name: str) -> Run:
    return run_plain(name)


def run_all(pool: RankPool, name: str, setting: Setting) -> list[Run] | str:
    """The runs of all ranks, or why there are none."""
    try:
        return pool.run(run_rank, name, setting, env=setting.environment)
    except RankFailed as failure:
        return str(failure)


def whole(runs: list[Run]) -> list[Note]:
    """The notes of all ranks as those of one process."""
    return [
        (name, kind, joined([run.notes[index][2] for run in runs]) if kind == "rows" else value)
        for index, (name, kind, value) in enumerate(runs[0].notes)
    ]


@pytest.mark.parametrize("name", [habit.name for habit in HABITS.values() if habit.apart])
def test_contract_of_jobs_that_end(name: str) -> None:
    habit = HABITS[name]
    for setting in habit.settings:
        command = (sys.executable, "-m", "tests.contract.apart", name, *map(str, setting.rows))
        ended = run_programs(len(setting.rows), *command, env=setting.environment)
        printed = "\n".join(program.stderr for program in ended)
        assert any(program.status != 0 for program in ended), printed
        for text in (habit.error, *habit.says):
            assert re.search(text, printed), printed


@pytest.mark.parametrize("name", [habit.name for habit in HABITS.values() if not habit.apart])
def test_contract(name: str, ranks: Ranks) -> None:
    habit = HABITS[name]
    expected = None if habit.outcome == "alike" else plain(name).notes
    wrong = []
    for setting in tried(name, habit.settings, alike=expected is None):
        pool = ranks(len(setting.rows))
        runs = run_all(pool, name, setting)
        if isinstance(runs, str):
            wrong.append(f"{setting}: {runs}")
            if habit.broken:
                return
            continue
        if expected is None and not any(run.error for run in runs):
            expected = whole(runs)
        found = judge(habit, setting, runs, expected or [])
        if found and any(run.error for run in runs):
            # Nobody knows what state such ranks are in.
            pool.close()
        wrong += [f"{setting}: {text}" for text in found]
        if wrong and habit.broken:
            return
    assert wrong == []
    assert not habit.broken, "the contract is kept now: take the mark away"
