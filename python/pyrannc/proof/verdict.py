"""How two outcomes differ, and where first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from pyrannc.call.variant import Variant
from pyrannc.proof.outcome import Outcome

ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Differences by rounding, relative to the largest element of a tensor, where a model computes in a type."""
_NOISE = 8.0
"""A gradient that is nothing but rounding of terms that cancel each other has so many roundings of the largest ones."""
_KINDS = ("Value", "output", "buffer", "gradient")


@dataclass(frozen=True)
class Difference:
    """Two tensors that should be equal.

    Attributes:
        kind: what they are: "Value", "output", "buffer" or "gradient".
        name: their own.
        where: who makes or uses them.
        size: the largest difference, relative to the largest element; infinite where one is missing.
        allowed: by rounding.
    """

    kind: str
    name: str
    where: str
    size: float
    allowed: float

    @property
    def is_real(self) -> bool:
        """True when rounding does not explain it."""
        return not self.size <= self.allowed


@dataclass(frozen=True)
class Verdict:
    """The comparison of all tensors of a call.

    Attributes:
        compared: in the order in which the model makes or uses them, kind by kind.
        notes: what to know of the comparison.
    """

    compared: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True when all differences are rounding."""
        return not any(item.is_real for item in self.compared)

    def __str__(self) -> str:
        lines = [*self._summary(), *self._first_ones(), *self.notes]
        return "\n".join(lines)

    def _summary(self) -> Iterator[str]:
        for kind in _KINDS:
            items = [item for item in self.compared if item.kind == kind]
            if items:
                wrong = sum(item.is_real for item in items)
                told = "all equal to rounding" if not wrong else f"{wrong} differ"
                largest = max(item.size for item in items)
                yield f"{len(items):6d} {kind + 's':10s} {told}, largest difference {largest:.1e}"

    def _first_ones(self) -> Iterator[str]:
        for kind in _KINDS:
            first = next((item for item in self.compared if item.kind == kind and item.is_real), None)
            if first is not None:
                yield f'first {kind} that differs: "{first.name}" ({first.where}), by {first.size:.1e}'


def compare(variant: Variant, here: Outcome, expected: Outcome) -> Verdict:
    """Holds what the ranks computed against one process."""
    body, whole = variant.facts, variant.whole.facts
    stage_of = {op: stage for stage, part in enumerate(variant.parts.stages) for op in part.ops}
    maker = {value: op for op, facts in enumerate(body.ops) for value in facts.results}
    found: list[Difference] = []
    # What is stored in a wide type may have been computed in a narrow one.
    computed = (value.dtype for value in whole.values if value.requires_grad)
    rounding = max((ALLOWED.get(dtype, 0.0) for dtype in computed), default=0.0)

    def place(op: int | None) -> str:
        return "no Op" if op is None else f"Stage {stage_of[op]}, {variant.captured.place(op)}"

    for value in sorted(expected.values):
        where = place(maker.get(value))
        found.append(
            difference(
                "Value", body.values[value].name, where, here.values.get(value), expected.values[value], rounding
            )
        )
    for value, tensor in expected.outputs.items():
        own = variant.body_of.get(value)
        where = "after all rows have joined" if own is None else place(maker.get(own))
        found.append(difference("output", whole.values[value].name, where, here.outputs[value], tensor, rounding))
    users = {p.names[0]: body.first_use.get(p.value) for p in body.params}
    for name, buffer in expected.buffers.items():
        found.append(difference("buffer", name, "after the call", here.buffers[name], buffer, rounding))
    largest = max((float(grad.abs().max()) for grad in expected.gradients.values() if _has_elements(grad)), default=0.0)
    for name in sorted(expected.gradients, key=lambda name: users.get(name) or 0):
        where = f"first used by {place(users.get(name))}"
        mine, right = here.gradients[name], expected.gradients[name]
        found.append(difference("gradient", name, where, mine, right, rounding, noise=largest))
    return Verdict(tuple(found), tuple(_notes(variant)))


def _has_elements(grad: Tensor | None) -> TypeGuard[Tensor]:
    return grad is not None and grad.numel() > 0


def difference(
    kind: str, name: str, where: str, here: Tensor | None, expected: Tensor | None, rounding: float, noise: float = 0.0
) -> Difference:
    """Two tensors, either of which may be missing.

    Args:
        rounding: allowed whatever type they are stored in.
        noise: the largest element of all tensors of their kind, where terms may cancel each other; else 0.
    """
    allowed = max(rounding, ALLOWED[expected.dtype]) if expected is not None and expected.dtype in ALLOWED else 0.0
    if here is None or expected is None:
        # An untouched parameter of a model that is spread has zeros where one process has nothing.
        rest = here if here is not None else expected
        size = float("inf") if rest is not None and bool(rest.any()) else 0.0
        return Difference(kind, name, where, size, allowed)
    if here.shape != expected.shape:
        return Difference(
            kind, f"{name} {list(here.shape)} instead of {list(expected.shape)}", where, float("inf"), 0.0
        )
    if here.numel() == 0 or torch.equal(here, expected):
        return Difference(kind, name, where, 0.0, allowed)
    least = _NOISE * torch.finfo(expected.dtype).eps * noise / allowed if noise and allowed else 0.0
    return Difference(kind, name, where, relative(here, expected, least), allowed)


def relative(one: Tensor, other: Tensor, least: float = 0.0) -> float:
    """The largest difference of elements, relative to the largest element of ``other``, or to ``least`` if that is
    more."""
    wide = torch.complex128 if other.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    scale = max(float(other.abs().max()), least)
    return float((one - other).abs().max()) / (scale or 1.0)


def _notes(variant: Variant) -> Iterator[str]:
    if variant.draws:
        yield (
            "the call draws random numbers: the one process ran the captured Graph, uncut, with the same draws; to "
            "compare with the model's own code set dropout to 0"
        )
    if variant.normalises_rows_in_hand:
        yield (
            "BatchNorm in training normalises over the rows in hand, which are fewer than in one process: with several "
            "microbatches or Replicas it differs as it does under DistributedDataParallel"
        )
