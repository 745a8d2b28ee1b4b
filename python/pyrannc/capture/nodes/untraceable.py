"""Failures of a capture that keeping a sub-module whole may mend, and which one to keep."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from pyrannc.capture.reads.assumptions import Assumes
from pyrannc.capture.user.source import Part, Place
from pyrannc.errors import CaptureError

_MOST_TRIES = 16
_LARGE = 0.5
"""Share of the parameters above which a question that later calls can ask again is no reason to keep them whole."""
_WORTH = 0.1
"""Share of the parameters from which on a sub-module is worth what is computed twice around it."""
_MOST_AROUND = 3
"""Sub-modules that the rest of the model may be tried to stay whole around."""
BY_DISTRIBUTIONS = ", as torch.distributions looks whether it is valid, unless given validate_args=False"
"""What errors add where it is such a question that keeps code whole."""
_Result = TypeVar("_Result")


class UntraceableError(CaptureError):
    """Something in the user's code cannot be written down as Ops.

    Attributes:
        place: where.
        cause: what, without advice.
        needs_rows: it asks for the number of rows of the batch as a Python number.
        may_assume: whether an answer of this batch would do, if every later one gave the same, and who can ask that.
        part: what was to stay whole, and cannot.
        raised: the model's own code, or what it calls, has raised an error.
        rows: with so many it was traced, where their number may be why it fails; 0 elsewhere.
        functions: of the user that were running there, the innermost first, up to the forward of the sub-module.
    """

    def __init__(
        self,
        message: str,
        place: Place,
        cause: str = "",
        *,
        needs_rows: bool = False,
        may_assume: Assumes = Assumes.NOTHING,
        part: Part | None = None,
        raised: bool = False,
        rows: int = 0,
    ) -> None:
        super().__init__(message)
        self.place = place
        self.cause = cause or message
        self.needs_rows = needs_rows
        self.may_assume = may_assume
        self.part = part
        self.raised = raised
        self.rows = rows
        self.functions: tuple[Part, ...] = ()


@dataclass(frozen=True)
class KeptWhole:
    """Parts of the model that a capture keeps whole because it fails in one of them.

    Attributes:
        paths: as :meth:`Part.of` reads them: the one in which it fails, and those at like places of the model.
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
        assumes: which answers are taken, as what would stay whole instead is too much, or nothing can.
        as_untraced: the model is not told that it is traced, as it fails where it knows.
    """

    named: Sequence[str] = ()
    found: list[KeptWhole] = field(default_factory=list)
    allow_uncut: bool = False
    assumes: Assumes = Assumes.NOTHING
    as_untraced: bool = False
    _wider: dict[str, list[Part]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """All of them."""
        return [*self.named, *(path for kept in self.found for path in kept.paths)]

    def until_captured(self, model: nn.Module, attempt: Callable[[Sequence[str]], _Result]) -> _Result:
        """What ``attempt`` gives, with as many parts kept whole as it takes.

        Args:
            model: the user's.
            attempt: takes what to keep whole, as :meth:`Part.of` reads it.

        Raises:
            CaptureError: nothing helps.
        """
        first: UntraceableError | None = None
        for _ in range(_MOST_TRIES):
            try:
                return attempt(self.paths)
            except UntraceableError as error:
                if error.raised and first is None:
                    self.as_untraced = True
                    with suppress(UntraceableError):
                        return attempt(self.paths)
                    self.as_untraced = False
                # Later ones may come of what was tried because of it.
                first = error if first is None or error.part is None else first
                self._add(model, error, first)
            except CaptureError as error:
                if first is None or type(error) is not CaptureError:
                    raise
                # It comes of what was tried, and not of the model alone.
                raise CaptureError(f"{first}\nLast tried: {error}") from error
        return attempt(self.paths)

    def _add(self, model: nn.Module, error: UntraceableError, first: UntraceableError) -> None:
        wider = self._parts_round(model, error)
        can_ask = error.may_assume is Assumes.OF_BUFFERS
        if error.may_assume and (not wider or (can_ask and _share(model, _alike(model, wider[0])) > _LARGE)):
            self.assumes = error.may_assume
            return
        if not wider:
            tried = "" if first is error else f"\nLast tried: {error}"
            advice = (
                "The whole model cannot be run in one piece either"
                if self.allow_uncut
                else "Nothing smaller than the whole model can be kept whole instead: RaNNCModule(..., "
                "allow_uncut=True) runs it in one piece, without Stages. A sub-module of their own for the failing "
                "lines would be kept whole by itself"
            )
            raise CaptureError(f"{first}{tried}\n{advice}") from first.__cause__ or first
        # It is not called by the name that it was to be caught by.
        missed = {part.text for part in error.functions}
        self.found = [kept for kept in self.found if missed.isdisjoint(kept.paths)]
        parts, rest = self._with_others(model, wider[0]), wider[1:]
        place, cause = error.place, error.cause
        # What the user says is to stay whole is not among those found.
        kept = next((kept for kept in self.found if error.part is not None and error.part.text in kept.paths), None)
        if kept is not None:
            # What gave the reason at first says more than why a smaller part cannot stay whole.
            self.found.remove(kept)
            place, cause = kept.place, kept.cause
        texts = [part.text for part in parts]
        self._wider.update(dict.fromkeys(texts, rest))
        self.found = [kept for kept in (_outside(kept, parts) for kept in self.found) if kept.paths]
        self.found.append(KeptWhole(tuple(texts), place, cause))

    def _with_others(self, model: nn.Module, part: Part) -> list[Part]:
        """A part and those at like places; of a class that has failed elsewhere too, all."""
        if part.function or part.around:
            return [part]
        kind = type(model.get_submodule(part.path))
        kept = [Part.of(text) for text in self.paths]
        again = any(
            p.method == part.method and type(model.get_submodule(p.path)) is kind
            for p in kept
            if not p.function and not p.around
        )
        if not again:
            return _alike(model, part)
        paths = [path for path, module in model.named_modules() if type(module) is kind]
        return [Part(path, part.method) for path in paths]

    def _parts_round(self, model: nn.Module, error: UntraceableError) -> list[Part]:
        """What may be kept whole, the smallest first."""
        if error.part is not None and error.part.text in self._wider:
            return self._wider[error.part.text]
        known = [Part.of(text) for text in self.paths]
        found = [part for part in error.functions if part not in known]
        path = error.place.module if error.part is None else error.part.path
        while path:
            part = Part(path)
            if part not in known and has_own_forward(model.get_submodule(path)):
                found.append(part)
            path = path.rpartition(".")[0]
        # Who allows the whole model to be one part may have batches of many forms.
        found += [Part("")] if self.allow_uncut else _around(model) * has_own_forward(model)
        found = [part for part in found if not any(is_inside(part, outer) for outer in known)]
        # What fails may be what the rest stays whole around.
        left_out = [part for part in known if part.around and _is_below(error.place.module, _inner(part))]
        return found or next((self._wider.get(part.text, []) for part in left_out), [])


def _outside(kept: KeptWhole, outer: Sequence[Part]) -> KeptWhole:
    paths = tuple(path for path in kept.paths if not any(is_inside(Part.of(path), other) for other in outer))
    return KeptWhole(paths, kept.place, kept.cause)


def is_inside(part: Part, outer: Part) -> bool:
    """True for a part of a part, or the same."""
    if part == outer or outer == Part(""):
        return True
    if outer.around:
        return not part.function and _is_below(part.path, outer.path) and not _is_below(part.path, _inner(outer))
    if part.function or outer.function or outer.method:
        return False
    return _is_below(part.path, outer.path)


def _inner(part: Part) -> str:
    """The path of the sub-module that a part stays whole around."""
    return f"{part.path}.{part.around}".lstrip(".")


def _is_below(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _around(model: nn.Module) -> list[Part]:
    """The model without some sub-module that has many of its parameters, outer ones first."""
    sizes = {name: _elements([module]) for name, module in model.named_modules() if name}
    least, lists = _WORTH * _elements([model]), (nn.ModuleList, nn.ModuleDict)
    found = [n for n, size in sizes.items() if size > least and not isinstance(model.get_submodule(n), lists)]
    found.sort(key=lambda name: (name.count("."), -sizes[name]))
    return [Part("", around=name) for name in found[:_MOST_AROUND]]


def has_own_forward(module: nn.Module) -> bool:
    """True for a module whose forward the user, or a package, has written; torch's own do as they are told."""
    return not type(module).__module__.startswith("torch.nn")


def _share(model: nn.Module, parts: Sequence[Part]) -> float:
    """Of the model's parameters, by elements; methods and functions have none."""
    if any(part.around for part in parts):
        return 1.0 - _share(model, [Part(_inner(part)) for part in parts])
    modules = [model.get_submodule(part.path) for part in parts if not part.method and not part.function]
    return _elements(modules) / max(1, _elements([model]))


def _elements(modules: Sequence[nn.Module]) -> int:
    """Of their parameters, each counted once."""
    return sum({id(param): param.numel() for module in modules for param in module.parameters()}.values())


def alike(model: nn.Module, path: str) -> list[str]:
    """The path of a sub-module, and those of its class whose paths differ in numbers only, as in repeated layers."""
    pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(path)))
    kind = type(model.get_submodule(path))
    found = [name for name, module in model.named_modules() if type(module) is kind and pattern.fullmatch(name)]
    return sorted({path, *found})


def _alike(model: nn.Module, part: Part) -> list[Part]:
    if not part.path or part.function or part.around:
        return [part]
    return [Part(path, part.method) for path in alike(model, part.path)]
