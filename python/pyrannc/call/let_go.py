"""Gradients that a script lets go of by itself, as by ``param.grad = None``: all ranks must, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyrannc.errors import MismatchError

Told = tuple[frozenset[str], frozenset[str]]
"""Of a rank, the parameters whose gradients have gone, and those that it holds and that had none, which only it knows:
by name."""


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
    """Raises MismatchError where ranks have let go of different gradients."""
    without = frozenset[str]().union(*(names for _, names in everyone))
    first, *others = [names - without for names, _ in everyone]
    for rank, names in enumerate(others, 1):
        for name in sorted(names ^ first):
            one, other = (rank, 0) if name in names else (0, rank)
            raise MismatchError(
                f'the script has let go of the gradient of parameter "{name}" (as by param.grad = None or '
                f"model.zero_grad()) on rank {one} and not on rank {other}, which a rank must not do by itself: "
                "decide by what is equal on all ranks"
            )
