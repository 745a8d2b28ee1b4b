"""The table as a document: ``docs/contract.md``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from .habit import Habit
from .habits import HABITS

FILE = Path(__file__).parents[2] / "docs" / "contract.md"

_SECTIONS = {
    "losses": "Losses",
    "models": "Models",
    "loops": "Training loops",
    "optimizers": "Optimizers",
    "wrapped_optimizers": "Optimizers made of others",
    "steps": "Between steps",
    "loss_scaling": "Loss scaling",
    "beside": "Beside the model",
    "beside_in_ddp": "Beside the model, in what averages by itself",
    "precision": "Mixed precision",
    "changes": "Changes between calls",
    "attributes": "What is kept in Python",
    "left": "What the forward leaves in Python",
    "questions": "Questions about data",
    "whole": "What no graph holds",
    "detection": "Lists of images and targets",
    "rows": "Rows and arguments",
    "packed": "Packed rows",
    "calls": "Who calls",
    "gradients": "Gradients in the forward",
    "chance": "Random numbers",
    "wrappers": "Wrappers, scripts, settings",
    "state": "Parameters and state",
}

_INTRODUCTION = """\
# What a script may count on

What a script computes under RaNNC is what one process with the global batch would compute, under every Plan. Where
that cannot be had, an error says so before a number goes wrong: what, where, and what to do instead. A warning is
enough only where the numbers stay right.

Each row below is a habit that `tests/contract` runs as a plain script, in one process and on several ranks: one Stage
with Replicas, several Stages, several microbatches, ranks with many, few and no rows. *Equal* means that losses,
outputs, gradients, parameters and buffers differ by less than 1e-10 in double precision. *Not yet* marks what is known
to break the contract today: the tests hold that too, until it is mended.

`tests/covering` runs 22 habits in float32, under autocast in bfloat16 and float16 and with parameters in bfloat16, with
what Replicas divide, Stages, the place of the loss, accumulation and clipping in any two combinations: numbers are at
most twice as far from exact ones as those of one process in the same precision.

This file is written by `CONTRACT=document pytest tests/contract/test_document.py`.
"""


def text() -> str:
    """The whole document."""
    assert {habit.section for habit in HABITS.values()} <= set(_SECTIONS), "every section has a title"
    return "\n".join([_INTRODUCTION, *(line for section in _SECTIONS for line in _section(section))])


def _section(name: str) -> Iterator[str]:
    yield f"## {_SECTIONS[name]}\n"
    yield (import_module(f"tests.contract.habits.{name}").__doc__ or "") + "\n"
    yield "| habit | outcome | what to know or to do instead |"
    yield "|---|---|---|"
    for habit in HABITS.values():
        if habit.section == name:
            yield f"| {_cell(habit.text)} | {_outcome(habit)} | {_cell(habit.instead)} |"
    yield ""


def _outcome(habit: Habit) -> str:
    if habit.broken:
        return f"**not yet**: {habit.broken}; meant: {_meant(habit)}"
    return _meant(habit)


def _meant(habit: Habit) -> str:
    if habit.outcome == "refused":
        return " or ".join(f"`{name}`" for name in habit.error.split("|"))
    if habit.outcome == "alike":
        return "the same under every Plan"
    return "equal, with a warning" if habit.says else "equal"


def _cell(words: str) -> str:
    return words.replace("|", "\\|")
