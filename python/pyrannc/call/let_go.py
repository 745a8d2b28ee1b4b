"""Gradients that a script lets go of by itself, as by ``param.grad = None``: all ranks must, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyrannc.errors import MismatchError

Told = tuple[frozenset[str], frozenset[str], frozenset[str]]
"""Of a rank, by name: parameters that it holds and whose gradients have gone, parameters of others that the script has
treated so here, and those that it holds and whose gradients have not gone."""


class TellsOfLetGo(Protocol):
    """Who takes note of it."""

    def number(self) -> int:
        """Stands for what the script has let go of; 0 for nothing."""
        ...

    def told(self) -> Told:
        """The same by name."""
        ...

    def settle(self) -> None:
        """All ranks have let go of the same."""
        ...


def refuse_different(everyone: Sequence[Told]) -> None:
    """Raises MismatchError where ranks have let go of different gradients.

    Who does not hold a parameter cannot know whether there was one, nor whether the script goes by what ranks hold.
    """
    by_own = not any(others for _, others, _ in everyone) and all(gone or not kept for gone, _, kept in everyone)
    for rank, (gone, others, _) in enumerate(everyone):
        for other, (gone_there, others_there, kept_there) in enumerate(everyone):
            differ = (gone | others) & kept_there
            if not by_own:
                differ |= gone - gone_there - others_there - kept_there
            if differ:
                raise MismatchError(
                    f'the script has let go of the gradient of parameter "{min(differ)}" (as by param.grad = None or '
                    f"model.zero_grad()) on rank {rank} and not on rank {other}, which a rank must not do by itself: "
                    "decide by what is equal on all ranks"
                )
