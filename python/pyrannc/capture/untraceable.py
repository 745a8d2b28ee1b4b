"""Failures of a capture that keeping a sub-module whole may mend, and which one to keep."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from pyrannc.errors import CaptureError

from .source import Place

_MOST_TRIES = 12
_LARGE = 0.5
"""Share of the parameters above which a question about what the model computes is no reason to keep it whole."""
_Result = TypeVar("_Result")


class UntraceableError(CaptureError):
    """Something in the user's code cannot be written down as Ops.

    Attributes:
        place: where.
        cause: what, without advice.
        needs_rows: it asks for the number of rows of the batch as a Python number.
        may_assume: an answer of this batch would do, if every later one gave the same.
    """

    def __init__(
        self, message: str, place: Place, cause: str = "", *, needs_rows: bool = False, may_assume: bool = False
    ) -> None:
        super().__init__(message)
        self.place = place
        self.cause = cause or message
        self.needs_rows = needs_rows
        self.may_assume = may_assume


@dataclass(frozen=True)
class KeptWhole:
    """Sub-modules that a capture keeps whole because it fails in one of them.

    Attributes:
        paths: the one in which it fails, and those of the same class at like places of the model.
        place: where it fails.
        cause: why.
    """

    paths: tuple[str, ...]
    place: Place
    cause: str


@dataclass
class WholeModules:
    """What stays whole: what the user says, and what the capture has turned out to need.

    Attributes:
        named: paths that the user gives.
        found: what was found, in order.
        allow_uncut: the whole model may be one of them.
        assumes: answers that no later call can check are taken, as what would stay whole instead is too much.
    """

    named: Sequence[str] = ()
    found: list[KeptWhole] = field(default_factory=list)
    allow_uncut: bool = False
    assumes: bool = False

    @property
    def paths(self) -> list[str]:
        """All of them."""
        return [*self.named, *(path for kept in self.found for path in kept.paths)]

    def until_captured(self, model: nn.Module, attempt: Callable[[Sequence[str]], _Result]) -> _Result:
        """What ``attempt`` gives, with as many sub-modules kept whole as it takes.

        Args:
            model: the user's.
            attempt: takes the paths of the sub-modules to keep whole.

        Raises:
            CaptureError: no sub-module helps.
        """
        first: UntraceableError | None = None
        for _ in range(_MOST_TRIES):
            try:
                return attempt(self.paths)
            except UntraceableError as error:
                # Later ones may come of what was tried because of it.
                first = error if first is None or error.place.file is not None else first
                self._add(model, error, first)
        return attempt(self.paths)

    def _add(self, model: nn.Module, error: UntraceableError, first: UntraceableError) -> None:
        path = self._smallest(model, error.place.module)
        if error.may_assume and (path is None or _share(model, _alike(model, path)) > _LARGE):
            self.assumes = True
            return
        if path is None:
            tried = "" if first is error else f"\nLast tried: {error}"
            advice = (
                "The whole model cannot be run in one piece either"
                if self.allow_uncut
                else "Nothing smaller than the whole model can be kept whole instead: RaNNCModule(..., "
                "allow_uncut=True) runs it in one piece, without Stages. A sub-module of their own for the failing "
                "lines would be kept whole by itself"
            )
            raise CaptureError(f"{first}{tried}\n{advice}") from first.__cause__ or first
        paths = _alike(model, path)
        self.found = [kept for kept in (_outside(kept, paths) for kept in self.found) if kept.paths]
        self.found.append(KeptWhole(tuple(paths), error.place, error.cause))

    def _smallest(self, model: nn.Module, path: str) -> str | None:
        """The innermost sub-module round ``path`` that is not kept whole yet; None if none is left."""
        known = self.paths
        while path:
            module = model.get_submodule(path)
            if path not in known and _has_forward(module) and not any(_is_inside(path, outer) for outer in known):
                return path
            path = path.rpartition(".")[0]
        return "" if self.allow_uncut and "" not in known else None


def _outside(kept: KeptWhole, outer: Sequence[str]) -> KeptWhole:
    paths = tuple(path for path in kept.paths if not any(_is_inside(path, other) for other in outer))
    return KeptWhole(paths, kept.place, kept.cause)


def _is_inside(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")


def _has_forward(module: nn.Module) -> bool:
    """True for a module whose forward the user, or a package, has written; torch's own do as they are told."""
    return not type(module).__module__.startswith("torch.nn")


def _share(model: nn.Module, paths: Sequence[str]) -> float:
    """Of the model's parameters, by elements."""
    inside = {id(param): param.numel() for path in paths for param in model.get_submodule(path).parameters()}
    return sum(inside.values()) / max(1, sum(param.numel() for param in model.parameters()))


def _alike(model: nn.Module, path: str) -> list[str]:
    """``path``, and other sub-modules of its class whose paths differ in numbers only, as in repeated layers."""
    if not path:
        return [""]
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(path)))
    kind = type(model.get_submodule(path))
    found = [name for name, module in model.named_modules() if type(module) is kind and pattern.fullmatch(name)]
    return sorted({path, *found})
