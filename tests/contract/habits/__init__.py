"""The table: a module for each section of the document."""

from tests.contract.habit import HABITS

from . import calls, chance, changes, loops, losses, models, optimizers, rows, state, wrappers  # noqa: F401  # the order of the document

__all__ = ["HABITS"]
