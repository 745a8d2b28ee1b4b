"""Which tensors of a call must have as many rows as others, as far as one trace tells it of all of them.

There each of them has a number of rows of its own, a symbol. A sum of two tensors, or a loss, takes two of these for
one, and would fail where they differ. The model's own questions, and those of a view that looks for the easiest way to
be one, may be answered otherwise then and prove nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from types import MappingProxyType

import sympy
import torch
from torch import Tensor

from .assumptions import FROM_ARGUMENTS
from .dims import symbols_in
from .ops import has_effect
from .oracle import BatchShapeEnv
from .sample import Sample
from .torch_internals.operators import schema
from .torch_internals.symbols import asking_operator
from .tracer import Session


def tied_rows(sample: Sample, places: Collection[int]) -> set[int]:
    """Of some tensors those with which the model does not run unless another one has as many rows, and unused ones.

    The others may be like that too: where it cannot be traced so, and behind questions of the model's own.

    Args:
        sample: a call, in which all tensors with rows have as many.
    """
    ties = _Ties()
    session = _Session(sample, (), FROM_ARGUMENTS, None, own_rows=places, shape_env=ties)
    unused: set[int] = set()
    try:
        with warnings.catch_warnings():
            # Of shapes that the user's call does not have.
            warnings.simplefilter("ignore")
            graph = session.run().gm.graph
    except Exception:  # no more than this can be found out so
        pass
    else:
        graph.eliminate_dead_code(is_impure_node=has_effect)
        inputs = graph.find_nodes(op="placeholder")[-len(session.inputs) :]
        unused = {place for place in places if not inputs[place].users}
    return unused | {place for place in places if session.symbols.get(place) in ties.found}


class _Session(Session):
    """Keeps what stands for rows.

    Attributes:
        symbols: by place of the tensors in question; none before there are tensors without data.
    """

    shape_env: _Ties
    symbols: Mapping[int, sympy.Symbol] = MappingProxyType({})

    def fakes(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        params, buffers, inputs = super().fakes()
        self.symbols = {place: next(iter(symbols_in(inputs[place]))) for place in self.own_rows}
        self.shape_env.wanted = set(self.symbols.values())
        return params, buffers, inputs


_OF_EQUAL_EXTENTS = {
    *("aten::bmm", "aten::baddbmm", "aten::stack", "aten::where", "aten::scaled_dot_product_attention"),
    *("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::mse_loss", "aten::l1_loss"),
    *("aten::smooth_l1_loss", "aten::huber_loss", "aten::kl_div", "aten::binary_cross_entropy"),
    "aten::binary_cross_entropy_with_logits",
}
"""What compares extents that have to be equal, and no others, besides operators that work element by element."""


def _compares_rows() -> bool:
    """True within a question that has one answer, or else a failure."""
    asking = asking_operator()
    return asking is not None and (torch.Tag.pointwise in asking.tags or schema(asking).name in _OF_EQUAL_EXTENTS)


class _NothingMoreError(Exception):
    """The trace has told what it can."""


class _Ties(BatchShapeEnv):
    """Notes which symbols operators take for others, until that is known of all, or something else has done that.

    Attributes:
        wanted: the symbols in question; none before there are tensors.
        found: those of them that operators have taken for others, or others for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wanted: set[sympy.Symbol] = set()
        self.found: set[sympy.Symbol] = set()
        self._is_over = False

    def tied(self, symbol: sympy.Symbol, size: sympy.Expr) -> None:
        both = {symbol, *size.free_symbols}
        if not both & self.wanted:
            return
        # From here on one stands for the other.
        self._is_over = self._is_over or not size.is_Symbol or not _compares_rows()
        if not self._is_over:
            self.found |= both

    def answered(self, expr: sympy.Basic) -> None:
        """Ends the trace as soon as it can tell nothing more."""
        if self.wanted and (self._is_over or self.wanted <= self.found):
            raise _NothingMoreError
