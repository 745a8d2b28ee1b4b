"""A Span at its place in a Stage: compiled code where there is some for what comes in, else its function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyrannc.blocks.compiled import SpanCode
from pyrannc.blocks.form import Form, Meta
from pyrannc.blocks.span import SpanFunction
from pyrannc.core.partition import SpanPart


@dataclass
class Fitted:
    """Compiled code for a place.

    Attributes:
        known: what came in last, of what stays from step to step.
        came: of results, which got gradients in backwards that took others than the code is for.
    """

    code: SpanCode
    known: list[Tensor | None]
    came: set[tuple[bool, ...]] = field(default_factory=set)

    def fits(self, takes: Sequence[Tensor]) -> bool:
        """True when the code is for such tensors."""
        known = self.known
        for place, tensor in enumerate(takes):
            if tensor is known[place]:
                continue
            if Meta.of(tensor) != self.code.form.takes[place]:
                return False
            if tensor.is_leaf and tensor.requires_grad:
                known[place] = tensor
        return True


@dataclass(eq=False)
class PlacedSpan:
    """A Span of a Stage.

    Attributes:
        function: what it shares with Spans that are alike.
        numbers: of its Ops that draw.
        fitted: compiled code, by rows, whether autograd is on, and whether only deterministic kernels may run.
        missed: under the same key, what came in for which there was no code.
    """

    part: SpanPart
    function: SpanFunction
    numbers: list[int]
    fitted: dict[tuple[int, bool, bool], Fitted] = field(default_factory=dict)
    missed: dict[tuple[int, bool, bool], tuple[Meta, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = f"span_{self.part.hash[:8]}"
        self.__module__ = __name__

    def __call__(self, rows: int, *takes: Tensor) -> Any:
        """What the Span gives: one Value by itself, others as a tuple."""
        if self.fitted:
            key = (rows, torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
            fitted = self.fitted.get(key)
            if fitted is not None:
                if fitted.fits(takes):
                    return fitted.code(self.numbers, takes, fitted.came)
                self.missed[key] = tuple(map(Meta.of, takes))
        return self.function.call(rows, *self.numbers, *takes)

    def better_form(self, key: tuple[int, bool, bool]) -> Form | None:
        """For what its code should have been compiled, as steps have shown; None where it is right."""
        fitted = self.fitted.get(key)
        if fitted is None:
            return None
        form, given = fitted.code.form, fitted.code.ends.given
        if len(fitted.came) == 1:
            (came,) = fitted.came
            wanted = tuple(item.taken or came[item.place] for item in given)
            form = replace(form, wanted=wanted)
        if key in self.missed:
            form = replace(form, takes=self.missed[key])
        return None if form == fitted.code.form else form
