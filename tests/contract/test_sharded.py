"""The contract where Replicas divide what they hold: as in one process, or an error that says at which level it works.

Some habits under one level each; ``CONTRACT=all`` tries all habits under all levels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from zlib import crc32

import pytest

from tests.ranks import RankPool

from .habit import Habit
from .habits import HABITS
from .judging import judge
from .settings import COVERING, Setting
from .test_contract import plain, run_all

LEVELS = (
    Setting((5, 3), 1, 2, zero="1"),
    Setting((3, 0, 5), 1, 4, zero="2"),
    Setting((3, 3, 2), 2, 2, zero="3"),
    Setting((5, 3), 1, 1, zero="3"),
)

REFUSED = {
    "plain_state_of_one_stage": "1",
    "optimizer_by_global_norm_in_one_stage": "1",
    "lbfgs_in_one_stage": "1",
    "whole_on_every_rank": "2",
    "gradients_kept_by_the_script": "2",
    "average_in_a_hook_after_the_step": "3",
    "average_put_in_place": "3",
    "weight_penalty_outside": "3",
    "data_replaced": "3",
    "overflow_of_a_layer_that_was_moved": "3",
    "vector_to_params": "3",
    "vector_to_params_of_parts": "3",
    "autocast_and_a_step_before_backward": "3",
}
"""Habits that need something whole, and from which level on they are refused where that is divided."""

_EVERY = 1 if os.environ.get("CONTRACT") == "all" else 13


def _tried() -> list[tuple[str, Setting]]:
    habits = [h for h in HABITS.values() if h.outcome == "equal" and not h.apart and not h.broken]
    pairs = [(habit.name, setting) for habit in habits for setting in _settings(habit)]
    # By name: what is tried stays so when habits are added.
    return [(name, setting) for name, setting in pairs if crc32(f"{name}: {setting}".encode()) % _EVERY == 0]


def _settings(habit: Habit) -> tuple[Setting, ...]:
    """A habit that works under some Plans and rows only has these."""
    if habit.settings is COVERING:
        return LEVELS
    return tuple(replace(own, zero=zero) for own, zero in zip(habit.settings, cycle("312"), strict=False))


@pytest.mark.parametrize(("name", "setting"), _tried(), ids=str)
def test_contract_with_divided_replicas(name: str, setting: Setting, ranks: Callable[[int], RankPool]) -> None:
    habit = HABITS[name]
    pool = ranks(len(setting.rows))
    runs = run_all(pool, name, setting)
    errors = runs if isinstance(runs, str) else " ".join(text for run in runs for text in run.error or ())
    if name in REFUSED and setting.zero >= REFUSED[name] and errors:
        pool.close()
        assert "RANNC_ENABLE_ZERO" in errors or "from_global" in errors
        return
    assert not isinstance(runs, str), runs
    if any(run.error for run in runs):
        # Nobody knows what state such ranks are in.
        pool.close()
    assert judge(habit, setting, runs, plain(name).notes) == []
