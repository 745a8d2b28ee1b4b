"""A habit: a script as users write it, and what the contract says of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .job import Job
from .settings import COVERING, ONCE, Setting

Script = Callable[[Job], None]


@dataclass(frozen=True)
class Habit:
    """A row of the table.

    Attributes:
        script: what the user does; its docstring is the row's first column.
        outcome: ``"equal"`` to one process, ``"alike"`` under every Plan, or ``"refused"``.
        settings: Plans and rows to try.
        error: regular expression for the class of the error that some rank raises.
        says: regular expressions for what the error, or the warning of an equal run, says.
        instead: what to do instead, or what else to know.
        tolerance: by how much numbers may differ, relative to their size if that is above one.
        apart: the script ends its job, so it gets one of its own.
        broken: what happens instead today, where the contract is not kept yet.
    """

    script: Script
    outcome: str
    settings: tuple[Setting, ...]
    error: str = ""
    says: tuple[str, ...] = ()
    instead: str = ""
    tolerance: float = 1e-10
    apart: bool = False
    broken: str = ""

    @property
    def name(self) -> str:
        return self.script.__name__

    @property
    def section(self) -> str:
        """The module that the script stands in."""
        return self.script.__module__.rpartition(".")[2]

    @property
    def text(self) -> str:
        return " ".join((self.script.__doc__ or "").split())


HABITS: dict[str, Habit] = {}
"""All habits by name, in the order of the document."""


def equal(
    settings: tuple[Setting, ...] = COVERING, *, note: str = "", tolerance: float = 1e-10
) -> Callable[[Script], Script]:
    """The numbers are those of one process."""
    return _listed(lambda script: Habit(script, "equal", settings, instead=note, tolerance=tolerance))


def warned(*says: str, settings: tuple[Setting, ...] = COVERING, instead: str) -> Callable[[Script], Script]:
    """The numbers are those of one process, and a warning is logged."""
    return _listed(lambda script: Habit(script, "equal", settings, says=says, instead=instead))


def alike(settings: tuple[Setting, ...] = COVERING, *, note: str) -> Callable[[Script], Script]:
    """The numbers are the same under every Plan."""
    return _listed(lambda script: Habit(script, "alike", settings, instead=note))


def refused(
    error: str, *says: str, settings: tuple[Setting, ...] = ONCE, instead: str, apart: bool = False
) -> Callable[[Script], Script]:
    """Every rank gets an error; what came before it is as in one process.

    A job ``apart`` ends: some rank with a status other than 0, and the errors are what ranks print.
    """
    return _listed(lambda script: Habit(script, "refused", settings, error, says, instead, apart=apart))


def not_yet(broken: str) -> Callable[[Script], Script]:
    """The contract is not kept yet: the test fails as soon as it is, to have this mark taken away."""

    def mark(script: Script) -> Script:
        HABITS[script.__name__] = replace(HABITS[script.__name__], broken=broken)
        return script

    return mark


def _listed(make: Callable[[Script], Habit]) -> Callable[[Script], Script]:
    def add(script: Script) -> Script:
        habit = make(script)
        assert habit.text, f"{habit.name} needs a docstring for the document"
        assert habit.name not in HABITS, f"two habits are named {habit.name}"
        assert all(re.compile(text) for text in habit.says)
        HABITS[habit.name] = habit
        return script

    return add
