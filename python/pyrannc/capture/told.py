"""Sub-modules that treat each row by itself because the script says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from .lower import Lowered
from .nodes.untraceable import UntraceableError, is_inside
from .trace.tracer import Trace
from .user.source import Part

_Found = TypeVar("_Found", bound=tuple[Trace, object, Lowered])


class ToldRowWise:
    """They are captured Op by Op where that says all of them, else they stay whole: each runs on the rows in hand.

    Args:
        paths: that the script names.

    Attributes:
        whole: those that stay whole, as far as is known.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self.whole: list[str] = []

    @property
    def by_ops(self) -> list[str]:
        """Those that do not stay whole."""
        return [path for path in self._paths if path not in self.whole]

    def until_captured(self, leaves: Sequence[str], attempt: Callable[[Sequence[str]], _Found]) -> _Found:
        """What ``attempt`` gives with these and as few of the told ones whole as it takes.

        Raises:
            UntraceableError: it fails elsewhere.
        """
        while True:
            try:
                found = attempt([*leaves, *self.whole])
            except UntraceableError as error:
                failing = self._with(error.place.module, leaves)
                if failing is None:
                    raise
            else:
                failing = self._not_by_ops(found, leaves)
                if failing is None:
                    return found
            self.whole.append(failing)

    def _with(self, module: str, leaves: Sequence[str]) -> str | None:
        """One that a sub-module belongs to."""
        open_paths = (path for path in self.by_ops if not _is_covered(path, leaves))
        return next((path for path in open_paths if is_inside(Part(module), Part(path))), None)

    def _not_by_ops(self, found: _Found, leaves: Sequence[str]) -> str | None:
        """One whose Ops rest on an answer of this batch, or are no group that others take only results of."""
        traced, _, lowered = found
        for assumption in traced.assumptions:
            failing = self._with(assumption.where.module, leaves)
            if failing is not None:
                return failing
        grouped = set(lowered.grouped)
        return next((path for path in self.by_ops if path not in grouped and not _is_covered(path, leaves)), None)


def _is_covered(path: str, leaves: Sequence[str]) -> bool:
    return any(is_inside(Part(path), Part.of(leaf)) for leaf in leaves)
