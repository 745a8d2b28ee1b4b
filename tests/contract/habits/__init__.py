"""The table: a module for each section of the document."""

from tests.contract.habit import HABITS

from . import (  # noqa: F401  # the order of the document
    attributes,
    beside,
    beside_in_ddp,
    calls,
    chance,
    changes,
    detection,
    gradients,
    left,
    loops,
    loss_scaling,
    losses,
    models,
    optimizers,
    packed,
    precision,
    questions,
    rows,
    state,
    steps,
    whole,
    wrapped_optimizers,
    wrappers,
)

__all__ = ["HABITS"]
