"""The contract where Replicas divide what they hold: as in one process, or an error that says at which level it works.

Some habits under one level each; ``CONTRACT=all`` tries all habits under all levels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.ranks import RankPool

from .habit import Habit
from .habits import HABITS
from .judging import judge
from .settings import Setting
from .test_contract import plain, run_all

LEVELS = (
    Setting((5, 3), 1, 2, zero="1"),
    Setting((3, 0, 5), 1, 4, zero="2"),
    Setting((3, 3, 2), 2, 2, zero="3"),
    Setting((7, 1), 1, 1, zero="3"),
)

REFUSED = {
    "plain_state_of_one_stage": "1",
    "optimizer_by_global_norm_in_one_stage": "1",
    "lbfgs_in_one_stage": "1",
    "whole_on_every_rank": "2",
    "gradients_kept_by_the_script": "2",
    "weight_penalty_outside": "3",
    "head_used_later": "3",
}
"""Habits that need something whole, and from which level on they are refused, with one Stage."""

_EVERY = 1 if os.environ.get("CONTRACT") == "all" else 13


def _tried() -> list[tuple[str, Setting]]:
    habits = [h for h in HABITS.values() if h.outcome == "equal" and not h.apart and not h.broken]
    pairs = [(habit.name, level) for habit in habits for level in LEVELS]
    return pairs[::_EVERY]


def _of_one_stage(habit: Habit, setting: Setting) -> Setting:
    """A habit that says with how many Stages it works has these."""
    stages = {known.stages for known in habit.settings}
    return setting if setting.stages in stages or 0 in stages else replace(setting, stages=min(stages))


@pytest.mark.parametrize(("name", "setting"), _tried(), ids=str)
def test_contract_with_divided_replicas(name: str, setting: Setting, ranks: Callable[[int], RankPool]) -> None:
    habit = HABITS[name]
    setting = _of_one_stage(habit, setting)
    pool = ranks(len(setting.rows))
    runs = run_all(pool, name, setting)
    assert not isinstance(runs, str), runs
    errors = [run.error for run in runs if run.error]
    if errors:
        # Nobody knows what state such ranks are in.
        pool.close()
    if name in REFUSED and setting.zero >= REFUSED[name]:
        assert errors
        assert all("RANNC_ENABLE_ZERO" in text or "from_global" in text for _, text in errors), errors
    else:
        assert judge(habit, setting, runs, plain(name).notes) == []
