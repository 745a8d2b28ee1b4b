"""Whether a call that stays whole treats each row by itself: it is tried on a few rows, together and apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .dims import Dim

ROWS = (4, 64)
"""Few, and enough for what begins at a number of rows."""
LAWS = ((1.0, 0.0), (1.0, 1.0), (1.0, -1.0), (10.0, 0.0), (0.1, 0.0))
"""Spread and mean of what is drawn, for what depends on a sign or a size."""
_RELATIVE = {torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-8}

Operand = tuple[Tensor, list[Dim | None], bool]
"""A tensor of the right type, its extents, and whether its contents stand for themselves: a parameter, a constant."""


_end_s: list[float] = []


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Trials that are not over after so many seconds, all of them together, find nothing."""
    _end_s.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end_s.pop()


def is_row_wise(call: Callable[..., Any], operands: Sequence[Any], device: torch.device) -> bool:
    """True when parts of a batch give parts of the results and of the gradients, in two divisions.

    A result without rows has to be the same number whatever the rows are. False too where the call cannot be tried.

    Args:
        call: takes the operands by position.
        operands: an :data:`Operand` for a tensor; anything else is given as it is.
        device: where it will run; it is tried there if it cannot be tried on the host.
    """
    # An index out of bounds is an error on the host, on a GPU it ends the process.
    for place in (torch.device("cpu"), device):
        if place.type == "cpu" or torch.cuda.is_available():
            try:
                return _holds(call, operands, place)
            except Exception:  # whatever the user's code raises: it cannot be tried there
                continue
    return False


def _holds(call: Callable[..., Any], operands: Sequence[Any], device: torch.device) -> bool:
    own = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=own), torch.enable_grad():
        torch.manual_seed(0)
        constants: list[Tensor] = []
        trials = (_Trial(call, operands, rows, device, constants, *law) for law in LAWS for rows in ROWS)
        return all(_in_time() and trial.holds(lo) for trial in trials for lo in (1, trial.rows // 2))


def _in_time() -> bool:
    return not _end_s or time.monotonic() < min(_end_s)


class _Trial:
    def __init__(
        self,
        call: Callable[..., Any],
        operands: Sequence[Any],
        rows: int,
        device: torch.device,
        constants: list[Tensor],
        spread: float,
        mean: float,
    ) -> None:
        self._call = call
        self._device = device
        self._constants = constants
        self._law = spread, mean
        self.rows = rows
        self._rows: dict[int, Tensor] = {}
        self._fixed: dict[int, Any] = {}
        self._sizes: dict[int, Dim] = {}
        self._per_row: dict[int, int] = {}
        for place, operand in enumerate(operands):
            if isinstance(operand, Dim):
                self._sizes[place] = operand
                continue
            if not isinstance(operand, tuple):
                self._fixed[place] = operand
                continue
            tensor, extents, stays = operand
            if any(dim is None for dim in extents):
                raise ValueError("an extent is not known")
            dims = [dim for dim in extents if dim is not None]
            if any(dim.per_row for dim in dims):
                self._rows[place] = self._batch(tensor, dims)
                self._per_row[place] = dims[0].per_row
            else:
                keep = stays and not tensor.is_meta
                own = [dim.fixed for dim in dims]
                fixed = tensor.detach().to(device, copy=True) if keep else _random(tensor, own, device, *self._law)
                self._fixed[place] = fixed.requires_grad_(tensor.requires_grad and fixed.is_floating_point())
        if not self._rows:
            raise ValueError("it has no rows")

    def _batch(self, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
        if dims[0].per_row < 1 or dims[0].fixed or any(dim.per_row for dim in dims[1:]):
            raise ValueError("rows are not in dimension 0 alone")
        return _random(tensor, [dim.at(self.rows) for dim in dims], self._device, *self._law)

    def holds(self, cut: int) -> bool:
        """True when the rows before the cut and those after it can be computed apart."""
        parts = (0, cut), (cut, self.rows)
        seeds: list[Tensor] = []
        whole = self._run((0, self.rows), seeds)
        pieces = [self._run(part, seeds) for part in parts]
        for index, result in enumerate(whole):
            found = [piece[index] for piece in pieces]
            there = [item for item in found if item is not None]
            with_rows = index < self._with_rows
            if result is None or not there or (with_rows and len(there) < len(found)):
                # No gradient, or one of nothing but zeros, as of what no row has come to.
                others = [item for item in (result, *there) if item is not None]
                if any(bool(item.any()) for item in others):
                    return False
                continue
            # Rows of results and of their gradients stand one after another, gradients of the rest are added.
            joined = torch.cat(there) if with_rows else torch.stack(there).sum(0)
            if joined.shape != result.shape or not _close(joined, result):
                return False
        return True

    def _run(self, part: tuple[int, int], seeds: list[Tensor]) -> list[Tensor | None]:
        """Results and gradients of what has rows, then the gradients of what has none."""
        lo, hi = part
        rows = {}
        for place, tensor in self._rows.items():
            per_row = self._per_row[place]
            rows[place] = _leaf(tensor[per_row * lo : per_row * hi])
        sizes = {place: dim.at(hi - lo) for place, dim in self._sizes.items()}
        tensors = {**self._fixed, **rows, **sizes}
        # A function may change what it is given.
        given = [_copy(tensors[place]) for place in range(len(tensors))]
        made = self._call(*given)
        made = [made] if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]
        results = [result for result in made if not self._is_constant(result)]
        if not self._same([result for result in made if self._is_constant(result)]):
            raise ValueError("a result without rows depends on them")
        if any(result.shape[0] % (hi - lo) or not result.shape[0] for result in results):
            raise ValueError("a result has no rows in dimension 0")
        roots = [result for result in results if result.requires_grad]
        if not seeds:
            seeds += [torch.randn_like(root) for root in roots]
        fixed = [item for item in self._fixed.values() if isinstance(item, Tensor) and item.requires_grad]
        leaves = [leaf for leaf in rows.values() if leaf.requires_grad]
        grads: Sequence[Tensor | None] = [None] * (len(leaves) + len(fixed))
        if roots and leaves + fixed:
            own = [seed[len(seed) // self.rows * lo : len(seed) // self.rows * hi] for seed in seeds]
            grads = torch.autograd.grad(roots, [*leaves, *fixed], own, allow_unused=True)
        self._with_rows = len(results) + len(leaves)
        return [*(result.detach() for result in results), *grads]

    @staticmethod
    def _is_constant(result: Tensor) -> bool:
        # What is true of all drawn numbers may be false of a batch, as that there is no infinite one.
        return result.dim() == 0 and not result.requires_grad and result.dtype is not torch.bool

    def _same(self, found: list[Tensor]) -> bool:
        """True when these are what the trials before have given."""
        if not self._constants:
            self._constants += found
        return len(found) == len(self._constants) and all(map(torch.equal, found, self._constants))


def _random(like: Tensor, shape: Sequence[int], device: torch.device, spread: float, mean: float) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.randn(list(shape), dtype=like.dtype, device=device) * spread + mean
    return torch.randint(0, 2, list(shape), device=device).to(like.dtype)


def _leaf(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() else copied


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


def _close(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    tolerance = _RELATIVE.get(expected.dtype, 1e-2)
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() <= tolerance * scale).all())
