"""Says in words where runs of a habit are not what the contract promises."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.runtime.equivalence import Differences

from .habit import Habit
from .job import Note
from .running import Run
from .settings import Setting

_SHOWN = 3


def judge(habit: Habit, setting: Setting, ranks: list[Run], expected: list[Note]) -> list[str]:
    """What is wrong with the runs of all ranks under a setting."""
    if habit.outcome == "refused":
        found = _judge_refusal(habit, ranks)
    else:
        found = [f"rank {rank} ended with {': '.join(run.error)}" for rank, run in enumerate(ranks) if run.error]
        found += _judge_plans(setting, ranks)
        if habit.says and not _told(habit, ranks):
            found.append(f"no warning says {habit.says}, but {[run.told for run in ranks]}")
    if not any("ended with" in text for text in found):
        different = _differences(habit, ranks, expected)
        found += different[:_SHOWN]
        if len(different) > _SHOWN:
            found.append(f"and {len(different) - _SHOWN} more differences")
    return found


def _judge_refusal(habit: Habit, ranks: list[Run]) -> list[str]:
    found = []
    for rank, run in enumerate(ranks):
        if run.error is None:
            found.append(f"rank {rank} went on without an error")
        else:
            found += [
                f"rank {rank}: {run.error} lacks {text!r}" for text in habit.says if not _says(text, run.error[1])
            ]
    if not any(re.fullmatch(habit.error, run.error[0]) for run in ranks if run.error):
        found.append(f"no rank raised {habit.error}")
    return found


def _says(expression: str, text: str) -> bool:
    return re.search(expression, text) is not None


def _told(habit: Habit, ranks: list[Run]) -> bool:
    return all(any(_says(text, told) for run in ranks for told in run.told) for text in habit.says)


def _judge_plans(setting: Setting, ranks: list[Run]) -> list[str]:
    """Forced numbers must be those of the Plan, or the setting proves nothing."""
    found = []
    for stages, microbatches in {plan for run in ranks for plan in run.plans}:
        if setting.stages not in (0, stages) or setting.microbatches not in (0, microbatches):
            found.append(f"the Plan has {stages} Stages and {microbatches} microbatches")
    return found


def _differences(habit: Habit, ranks: list[Run], expected: list[Note]) -> list[str]:
    """Where notes differ from one process; where an error is expected, those before it."""
    differences = Differences(habit.tolerance)
    count = min(len(run.notes) for run in ranks)
    if habit.outcome != "refused":
        lengths = [len(run.notes) for run in ranks]
        differences.demand(set(lengths) == {len(expected)}, f"{lengths} notes instead of {len(expected)}")
    for index, (name, kind, value) in enumerate(expected[:count]):
        notes = [run.notes[index] for run in ranks]
        if any(note[:2] != (name, kind) for note in notes):
            differences.demand(False, f"note {index}: {[note[:2] for note in notes]} instead of {name}")
        elif kind == "rows":
            differences.compare(f"note {index}, {name}", joined([note[2] for note in notes]), value)
        else:
            for rank, note in enumerate(notes):
                differences.compare(f"note {index}, {name} on rank {rank}", note[2], value)
    return differences.found


def joined(parts: list[Any]) -> Any:
    """Structures of tensors as one, rows one after another."""
    return pytree.tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *parts)
