"""Symbolic sizes, and what is asked of them."""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import SLoc
from torch._subclasses import fake_tensor
from torch.fx.experimental import symbolic_shapes

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers of a trace that extents or data tell. Public: each of them."""


def fake_of(
    mode: fake_tensor.FakeTensorMode, name: str, tensor: Tensor, per_row: int, free: Collection[int] = ()
) -> Tensor:
    """``tensor`` without data, dimension 0 so many times a symbol. Public: ``torch.export.Dim`` and export.

    Args:
        free: the dimensions whose extents are symbols, too, the same one where they are equal.
    """
    if per_row > 1:
        later = [dim + 1 for dim in free]
        by_row = fake_of(mode, name, tensor.detach().unflatten(0, (-1, per_row)), 1, later)  # type: ignore[no-untyped-call]  # torch has no types for it
        shape = (by_row.shape[0] * per_row, *by_row.shape[2:])
        with mode:
            made = torch.empty_strided(shape, by_row.stride()[1:], dtype=tensor.dtype, device=tensor.device)
            return made.requires_grad_(tensor.requires_grad)
    dynamic, static = symbolic_shapes.DimDynamic.DUCK, symbolic_shapes.DimDynamic.STATIC
    sizes = [dynamic if dim in free or (per_row and dim == 0) else static for dim in range(tensor.dim())]
    context: symbolic_shapes.StatelessSymbolicContext[Any, Any] = symbolic_shapes.StatelessSymbolicContext(
        dynamic_sizes=sizes
    )
    from torch._dynamo.source import ConstantSource

    fake: Tensor = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))
    return fake


class ShapeQuestions(symbolic_shapes.ShapeEnv):
    """Symbolic sizes whose guards can be answered and watched by those who inherit from it. Public: none.

    Attributes:
        asked_aside: how many guards were asked under ``suppress_guards``, which leave nothing.
    """

    asked_aside = 0

    def answer(self, expr: sympy.Basic) -> sympy.Basic | None:
        """The answer to a question about data; None leaves torch's error as it is."""
        return None

    def answered(self, expr: sympy.Basic, answer: sympy.Basic) -> None:
        """Sees every other guard right after its answer."""

    def granted(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
        """Sees an extent that data tell, and what an operator takes it for: something that no data tell."""

    @property
    def conditions(self) -> list[sympy.Basic]:
        """Of all symbols that have a number in the sample, what the answers so far rest on."""
        return list(dict.fromkeys(guard.expr for guard in self.guards))

    def is_fixed(self, symbol: sympy.Symbol) -> bool:
        """True when the answers so far leave one value, or another symbol, for ``symbol``."""
        return symbol in self.replacements

    def replace(self, expr: Any) -> Any:  # type: ignore[override]  # torch's own keeps its answers
        """An expression after what was learned of its symbols, mostly nothing; torch asks for it at each step."""
        return super().replace(expr) if self.replacements else expr

    def _create_fx_call_function(self, op: Any, args: Any) -> tuple[fx.Node | None, bool]:
        """The node that only torch's validation of symbols makes; elsewhere its record of events would take long."""
        return super()._create_fx_call_function(op, args) if self._translation_validation_enabled else (None, False)

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        """Where a guard comes from: for torch's errors, but not for its logs, as it imports export to find it out."""
        if is_debug:
            return super()._get_stack_summary(is_debug, framework_loc)
        return SLoc(framework_loc or "", None), ""

    def evaluate_sym_node(
        self, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> sympy.Basic:
        """Answers a guard; torch calls it."""
        try:
            answer = super().evaluate_sym_node(sym_node, size_oblivious, fallback_value)
        except symbolic_shapes.GuardOnDataDependentSymNode:
            answer = self.answer(self.replace(sym_node.expr))
            if answer is None:
                raise
            self.pending_fresh_unbacked_symbols.clear()
        if self._suppress_guards_tls():
            self.asked_aside += 1
        else:
            self.answered(sym_node.expr, answer)
        return answer

    def guard_or_defer_runtime_assert(  # type: ignore[override]  # torch's own keeps its answers
        self, orig_expr: Any, msg: str, fx_node: fx.Node | None = None
    ) -> bool:
        """Takes for granted what an operator needs; torch calls it."""
        of_data = [symbol for symbol in self.replace(orig_expr).free_symbols if self.is_unbacked_symint(symbol)]
        holds: bool = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        for symbol in of_data:
            size = self.replace(symbol)
            if not any(map(self.is_unbacked_symint, size.free_symbols)):
                self.granted(symbol, size)
        return holds


def asking() -> str:
    """Who asks what is being answered: an operator, by its name, or "" for the code that calls it. Public: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return str(frame.f_locals.get("func"))
        frame = frame.f_back
    return ""


def is_a_branch() -> bool:
    """True where what is being answered is taken for true or false, or 1 or 0, by Python code. Public: none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _TAKEN:
        frame = frame.f_back
    return frame is not None


_TAKEN = torch.SymBool.__bool__.__code__, torch.SymBool.__int__.__code__


def expression(number: Any) -> sympy.Expr:
    """What a symbolic number is in terms of its symbols. Public: none."""
    return number.node.expr


def simplified(number: Any) -> sympy.Expr:
    """Likewise, after all that the trace has learned of the symbols. Public: none."""
    return number.node.shape_env.simplify(number.node.expr)


def symbolic_integer(mode: fake_tensor.FakeTensorMode, expr: sympy.Expr, value: int) -> torch.SymInt:
    """The number that is ``expr`` of symbols of ``mode``, and ``value`` in the sample. Public: none."""
    assert mode.shape_env is not None
    made = mode.shape_env.create_symintnode(expr, hint=value)
    assert isinstance(made, torch.SymInt)
    return made


def hint(number: Any) -> Any:
    """The number that a symbolic one had in the sample. Public: none."""
    return number.node.hint
