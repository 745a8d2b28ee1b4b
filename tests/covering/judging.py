"""Says in words where the ranks' numbers are further from the truth than one process in the same precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.contract.job import Note
from tests.contract.judging import joined
from tests.runtime.equivalence import Differences

EXACT = 1e-10

FACTOR = 2.0
"""How much further from the truth all numbers of a kind together may be than in one process."""

LUCK = 4.0
"""Likewise the numbers with one name, which are fewer: their errors are a draw each, not always the same one."""


ROUNDINGS = 2.0
"""Each step rounds what it keeps."""

_FLOAT32 = torch.finfo(torch.float32).eps / 2


def together(ranks: list[list[Note]]) -> tuple[list[Note], list[str]]:
    """The notes of all ranks as those of one process, and where ranks do not agree with rank 0."""
    differences = Differences(0.0)
    differences.demand(len({len(notes) for notes in ranks}) == 1, f"{[len(notes) for notes in ranks]} notes")
    found = []
    for notes in zip(*ranks, strict=False):
        name, kind, value = notes[0]
        if kind == "same":
            for rank, note in enumerate(notes):
                differences.compare(f"{name} on rank {rank}", note[2], value)
        else:
            value = joined([note[2] for note in notes])
        found.append((name, kind, value))
    return found, differences.found


def unlike(got: list[Note], expected: list[Note]) -> list[str]:
    """Where notes have other names, forms or types, or other numbers are infinite; how near they are is not asked."""
    forms = [[(name, kind, pytree.tree_map(_form, value)) for name, kind, value in notes] for notes in (got, expected)]
    return differences(*forms)


def _form(leaf: Any) -> Any:
    return (leaf.dtype, leaf.isfinite().double()) if isinstance(leaf, Tensor) else leaf


def differences(got: list[Note], expected: list[Note]) -> list[str]:
    """Where notes have other names, forms, types or numbers."""
    found = Differences(EXACT)
    found.demand([note[:2] for note in got] == [note[:2] for note in expected], "other notes than in one process")
    for (name, _, value), (_, _, right) in zip(got, expected, strict=False):
        found.compare(name, value, right)
    return found.found


@dataclass(frozen=True)
class Error:
    """How far numbers are from the truth.

    Attributes:
        mine: root of the sum of squared distances, of the ranks.
        plain: likewise, of one process in the same precision.
        size: root of the sum of squares of the truth.
        rounding: half of the distance from 1 to the next number, of the type that the numbers are kept in.
        scalar: the numbers are one at each step.
    """

    mine: float
    plain: float
    size: float
    rounding: float
    scalar: bool

    def __add__(self, other: Error) -> Error:
        return Error(
            math.hypot(self.mine, other.mine),
            math.hypot(self.plain, other.plain),
            math.hypot(self.size, other.size),
            max(self.rounding, other.rounding),
            self.scalar and other.scalar,
        )


def errors(got: list[Note], plain: list[Note], truth: list[Note]) -> dict[str, Error]:
    """By name of the notes, over all steps; what is infinite in truth is left out."""
    found: dict[str, Error] = {}
    for notes in zip(got, plain, truth, strict=True):
        for leaves in zip(*(pytree.tree_leaves(value) for _, _, value in notes), strict=True):
            if isinstance(leaves[2], Tensor) and leaves[2].is_floating_point():
                name, error = notes[0][0], _error(*leaves)
                found[name] = found[name] + error if name in found else error
    return found


def _error(mine: Tensor, plain: Tensor, right: Tensor) -> Error:
    known = right.isfinite()
    distances = [(item.double() - right)[known].norm().item() for item in (mine, plain)]
    size = right[known].norm().item()
    return Error(*distances, size=size, rounding=torch.finfo(mine.dtype).eps / 2, scalar=right.dim() == 0)


def worse(by_name: dict[str, Error], rounding: float) -> list[str]:
    """Names whose numbers are further from the truth than luck explains.

    What is exact in one process may be off by :data:`ROUNDINGS` of the type that it is kept in. The few losses and
    norms of a habit are kept in float32 at least, and may, exact by chance, be off by one of the type that is computed
    in.
    """
    found = []
    for name, error in by_name.items():
        roundings = max(rounding, ROUNDINGS * _FLOAT32) if error.scalar else ROUNDINGS * error.rounding
        allowed = LUCK * error.plain + roundings * error.size
        if not error.mine <= allowed:
            found.append(f"{name} is off by {error.mine:.3g}, in one process by {error.plain:.3g}, of {error.size:.3g}")
    return found


def worse_kinds(habits: Iterable[dict[str, Error]]) -> list[str]:
    """Kinds of numbers that over all habits are more than :data:`FACTOR` times further from the truth.

    Losses and norms are few, and may be off by one rounding of the type that they are computed in: of float32
    where they are noted in float64.
    """
    kinds: dict[str, Error] = {}
    for by_name in habits:
        for name, error in by_name.items():
            kind = kind_of(name)
            kinds[kind] = kinds[kind] + error if kind in kinds else error
    return [
        f"{kind}: off by {error.mine:.3g}, in one process by {error.plain:.3g}, of {error.size:.3g}"
        for kind, error in kinds.items()
        if not error.mine
        <= FACTOR * error.plain + (max(error.rounding, _FLOAT32) * error.size if error.scalar else 0.0)
    ]


def kind_of(name: str) -> str:
    """Losses, norms, outputs, gradients, or the state that steps make."""
    first = name.partition(" ")[0]
    return first if first in ("loss", "norm", "output", "gradient") else "state"
