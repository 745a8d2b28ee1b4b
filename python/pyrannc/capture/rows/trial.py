"""Whether a call that stays whole treats each row by itself: it is tried on a few rows, together and apart."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyrannc.capture.nodes.bounds import within_bounds
from pyrannc.capture.nodes.chance import alike_draws, torch_draws
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.progress import goes_on
from pyrannc.capture.torch_internals.devices import all_digits
from pyrannc.capture.torch_internals.fakes import FakeTensor
from pyrannc.capture.torch_internals.levels import regions_ended
from pyrannc.capture.torch_internals.tensors import TorchDispatchMode, pytree

FEW, MANY = 4, 64
"""Rows that are tried at least: few, and enough for what begins at a number of them."""
MOST_BYTES = 1 << 30
"""Of what goes into a call; a trial holds several times as much."""
_LIGHT_BYTES = 32 << 20
"""Of that, with which no more rows than the batch has are too many to try."""
MOST_BYTES_INSIDE = 4 << 30
"""Of all that a call makes inside, much of which is kept for its gradients."""


class _Law(NamedTuple):
    """How contents are drawn: floats of this spread and mean, integers this one or the next."""

    spread: float
    mean: float
    integer: int = 0


_LAWS = (_Law(1.0, 0.0), _Law(1.0, 1.0), _Law(1.0, -1.0), _Law(10.0, 0.0), _Law(0.1, 0.0))
"""For what depends on a sign or a size."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FIRST_INTEGERS = (0, 1)
"""The second where nothing can be tried with the first: no sequence has a length of 0."""
RELATIVE = {torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-8}
_TYPICAL = 0.2
"""Share of what one element may differ by that all of them may, by root mean square: few roundings are so large."""
_NOISE = 8.0
"""A gradient that is nothing but terms that cancel each other has so many roundings of the largest one."""

_MOST_DRAWS = 256
"""From Python or NumPy, of one row, that get the same number."""

_SAID_OF_CONTENTS = (
    "out of bounds",
    "out of range",
    "Class values must be",
    "should be between 0 and 1",
    "probability tensor contains",
    "Expected p_in >= 0",
)
"""In errors of gathering, of one_hot, of binary cross entropy, of multinomial and of bernoulli."""

Operand = tuple[Tensor, list[Dim | None], bool]
"""A tensor of the right type, its extents, and whether its contents stand for themselves: a parameter, a constant, or
rows of the batch, of which trials choose."""


_left_s: list[float] = []


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Trials that are not over after so many seconds, all of them together, find nothing. Only they count."""
    _left_s.append(seconds)
    try:
        yield
    finally:
        _left_s.pop()


_end_s: list[float] = []
"""Of the trials that run."""


@contextmanager
def _counted() -> Iterator[None]:
    """Takes the time of trials from what is left for them."""
    start = time.monotonic()
    _end_s.append(start + min(_left_s, default=math.inf))
    try:
        yield
    finally:
        _end_s.pop()
        spent = time.monotonic() - start
        _left_s[:] = [left - spent for left in _left_s]


def as_drawn(operands: Sequence[Any]) -> Hashable | None:
    """What a trial knows of operands; None where it takes some as they are."""
    known: list[Hashable] = []
    for operand in operands:
        if isinstance(operand, tuple) and not isinstance(operand, Dim):
            tensor, extents, stays = operand
            if stays and not tensor.is_meta:
                return None
            known.append((tensor.dtype, tensor.requires_grad, tuple(extents)))
        elif isinstance(operand, Hashable):
            known.append((type(operand), operand))
        else:
            return None
    return tuple(known)


def rows_shown(call: Callable[..., Any], operands: Sequence[Any], device: torch.device, rows: int) -> int:
    """Of how many rows, at most, parts give parts of the results and of the gradients, in two divisions; 0: of none.

    A result without rows has to be the same number whatever the rows are, or one of the operands. 0 too where the
    call cannot be tried.

    Args:
        call: takes the operands by position.
        operands: an :data:`Operand` for a tensor; anything else is given as it is.
        device: where it will run; it is tried there if it cannot be tried on the host.
        rows: of the whole batch, which are tried as far as memory and time go.
    """
    with _counted():
        return _rows_shown(call, operands, device, rows)


def _rows_shown(call: Callable[..., Any], operands: Sequence[Any], device: torch.device, rows: int) -> int:
    # Rows that have sizes are few and large.
    least = max(2 * FEW, rows)
    many = least if _has_chosen(operands) else max(MANY, rows)
    for integer in _FIRST_INTEGERS if _has_integers(operands) else _FIRST_INTEGERS[:1]:
        # On a GPU an index out of bounds ends the process: there the least integers alone are tried.
        on_gpu = [device] if torch.cuda.is_available() and integer == 0 else []
        laws = [law._replace(integer=integer) for law in _LAWS]
        shown = _rows_shown_by(laws, call, operands, [torch.device("cpu"), *on_gpu], many, least)
        if shown is not None:
            return shown
    return 0


def _rows_shown_by(
    laws: Sequence[_Law],
    call: Callable[..., Any],
    operands: Sequence[Any],
    places: Sequence[torch.device],
    many: int,
    least: int,
) -> int | None:
    """Likewise, at the first place where the call can be tried; None where there is none."""
    for place in places:
        try:
            with nullcontext() if place.type == "cpu" else within_bounds():
                if not _has_chosen(operands) and _holds_for_parts(call, operands, place, laws):
                    # What begins at a number of tokens, such as a capacity, is seen with whole rows alone.
                    return _holds(call, operands, place, many, least, laws[:1])
                return _holds(call, operands, place, many, least, laws)
        except Exception as error:  # whatever the user's code raises: it cannot be tried there
            if _ends_a_gpu(error):
                return None
    return None


def _has_integers(operands: Sequence[Any]) -> bool:
    """True where trials make integers up."""
    tensors = [operand for operand in operands if isinstance(operand, tuple) and not isinstance(operand, Dim)]
    return any(not stays and tensor.dtype in INTEGERS for tensor, _, stays in tensors)


def _ends_a_gpu(error: Exception) -> bool:
    """True for what the host finds in contents, and a GPU too, but there it ends the process."""
    text = str(error)
    return isinstance(error, IndexError) or any(said in text for said in _SAID_OF_CONTENTS)


def _holds_for_parts(
    call: Callable[..., Any], operands: Sequence[Any], device: torch.device, laws: Sequence[_Law]
) -> bool:
    """True for what treats even each token of each row by itself, which takes far fewer of them to try."""
    dims = [dim for operand in operands for dim in _dims_of(operand) if dim is not None and dim.per_row]
    parts = math.gcd(*(dim.per_row for dim in dims))
    if parts < 2:
        return False

    def finer(dim: Dim | None) -> Dim | None:
        return dim and Dim(dim.per_row // parts, dim.fixed)

    made = [
        finer(operand)
        if isinstance(operand, Dim)
        else (operand[0], [finer(dim) for dim in operand[1]], operand[2])
        if isinstance(operand, tuple)
        else operand
        for operand in operands
    ]
    try:
        return _holds(call, made, device, MANY, MANY, laws) > 0
    except Exception:  # as of a view with the row's own extents
        return False


def _has_chosen(operands: Sequence[Any]) -> bool:
    """True where trials take rows of the batch, which cannot be had in parts."""
    return any(isinstance(o, tuple) and not isinstance(o, Dim) and o[2] and any(_rows_in(o[1])) for o in operands)


def _rows_in(dims: Sequence[Dim | None]) -> list[int]:
    return [dim.per_row for dim in dims if dim is not None]


def _dims_of(operand: Any) -> Sequence[Dim | None]:
    if isinstance(operand, Dim):
        return [operand]
    return operand[1] if isinstance(operand, tuple) else []


def _holds(
    call: Callable[..., Any],
    operands: Sequence[Any],
    device: torch.device,
    many: int,
    least: int,
    laws: Sequence[_Law],
) -> int:
    """With how many rows it holds for all laws, ``least`` where ``many`` take long; 0: it does not."""
    with torch_draws(0, device), torch.enable_grad(), all_digits():
        seen, shown = _Seen(), many
        for number, law in enumerate(laws):
            trial, start = _Trial(call, operands, FEW, device, seen, number, law), time.monotonic()
            if not trial.holds_in_time():
                return 0
            wanted = many if trial.is_light_at(many) else least
            fitting = min(wanted, trial.most_rows, max(MANY, _rows_in_time(time.monotonic() - start, laws)))
            if fitting > FEW and not _Trial(call, operands, fitting, device, seen, number, law).holds_in_time():
                return 0
            shown = min(shown, max(fitting, FEW))
        return shown


def _in_time() -> bool:
    return time.monotonic() < _end_s[-1]


def _rows_in_time(spent: float, laws: Sequence[_Law]) -> int:
    """For how many rows there is time, after so many seconds for :data:`FEW`; half of it is left over."""
    left = (_end_s[-1] - time.monotonic()) / (2 * len(laws))
    return sys.maxsize if math.isinf(left) else int(FEW * left / max(spent, 1e-9))


@dataclass
class _Seen:
    """What all trials of a call have to find.

    Attributes:
        constants: results that are numbers.
        places: by result, that of the operand that it is; None before the first trial.
        kinds: types in which something was computed.
    """

    constants: list[Tensor] = field(default_factory=list)
    places: list[int | None] | None = None
    kinds: set[torch.dtype] = field(default_factory=set)


class _Kinds(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes the types of what operators make, and how many bytes that takes."""

    supports_higher_order_operators = True

    def __init__(self, kinds: set[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._kinds = kinds
        self.made_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Attention traces what it does to scores.
        tensors = [item for item in pytree.tree_leaves(made) if isinstance(item, Tensor) and not _is_fake(item)]
        self._kinds.update(item.dtype for item in tensors)
        taken = pytree.tree_leaves((args, kwargs)) if tensors else []
        given = {_memory(item) for item in taken if isinstance(item, Tensor) and not _is_fake(item)}
        self.made_bytes += sum(item.nbytes for item in tensors if _memory(item) not in given)
        return made


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Trial:
    def __init__(
        self,
        call: Callable[..., Any],
        operands: Sequence[Any],
        rows: int,
        device: torch.device,
        seen: _Seen,
        number: int,
        law: _Law,
    ) -> None:
        self._call = call
        self._device = device
        self._seen = seen
        self._number, self._law = number, law
        self.rows = rows
        self._rows: dict[int, Tensor] = {}
        self._fixed: dict[int, Any] = {}
        self._sizes: dict[int, Dim] = {}
        self._per_row: dict[int, int] = {}
        self._made_bytes = self._inside_bytes = 0
        self._choice: Tensor | None = None
        if _bytes_at(rows, operands) > MOST_BYTES:
            raise ValueError("it is too large")
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
                self._rows[place] = self._chosen(tensor, dims) if stays else self._batch(tensor, dims)
                self._per_row[place] = dims[0].per_row
            else:
                keep = stays and not tensor.is_meta
                own = [dim.fixed for dim in dims]
                fixed = tensor.detach().to(device, copy=True) if keep else _random(tensor, own, device, self._law)
                self._fixed[place] = fixed.requires_grad_(tensor.requires_grad and fixed.is_floating_point())
        if not self._rows:
            raise ValueError("it has no rows")

    @property
    def most_rows(self) -> int:
        """With so many rows, no more than :data:`MOST_BYTES` go in and come out, nor is too much made inside."""
        fixed = sum(item.nbytes for item in self._fixed.values() if isinstance(item, Tensor))
        per_row = max(sum(item.nbytes for item in self._rows.values()), self._made_bytes) / self.rows
        inside = MOST_BYTES_INSIDE * self.rows / max(self._inside_bytes, 1)
        return int(min((MOST_BYTES - fixed) / max(per_row, 1.0), inside))

    def is_light_at(self, rows: int) -> bool:
        """True where so many rows make little inside, and so take little time."""
        return self._inside_bytes * rows <= _LIGHT_BYTES * self.rows

    def _batch(self, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
        if dims[0].per_row < 1 or dims[0].fixed or any(dim.per_row for dim in dims[1:]):
            raise ValueError("rows are not in dimension 0 alone")
        return _random(tensor, [dim.at(self.rows) for dim in dims], self._device, self._law)

    def _chosen(self, tensor: Tensor, dims: Sequence[Dim]) -> Tensor:
        """Rows of a tensor, of all such tensors the same ones."""
        by_row = tensor.detach().to(self._device).unflatten(0, (-1, dims[0].per_row))  # type: ignore[no-untyped-call]  # torch has no types for it
        if self._choice is None:
            # In their order, as the model may want them sorted, the longest first.
            self._choice = torch.randint(0, by_row.shape[0], (self.rows,), device=self._device).sort().values
        chosen: Tensor = by_row[self._choice].flatten(0, 1)
        return chosen

    def holds_in_time(self) -> bool:
        """True when the rows can be computed in two parts, cut in two ways."""
        goes_on()
        return all(_in_time() and self._holds(cut) for cut in (1, self.rows // 2))

    def _holds(self, cut: int) -> bool:
        """True when the rows before the cut and those after it can be computed apart."""
        parts = (0, cut), (cut, self.rows)
        seeds: list[Tensor] = []
        whole = self._run((0, self.rows), seeds)
        largest = max((_largest(item) for item in whole[self._results :] if item is not None), default=0.0)
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
            least = largest if index >= self._results else 0.0
            if joined.shape != result.shape or not self._close(joined, result, least, summed=not with_rows):
                return False
        return True

    def _close(self, found: Tensor, expected: Tensor, largest: float, *, summed: bool) -> bool:
        """True but for roundings.

        Args:
            found: of parts.
            expected: of the whole.
            largest: of all gradients, the smallest of which may be roundings of theirs.
            summed: over rows, as roundings are then, too.
        """
        if not expected.is_floating_point():
            return torch.equal(found, expected)
        kind = max({expected.dtype, *self._seen.kinds} & RELATIVE.keys(), key=RELATIVE.__getitem__, default=None)
        if kind is None:
            return torch.equal(found, expected)
        noise, difference = _NOISE * torch.finfo(kind).eps * largest, found.double() - expected.double()
        if _largest(difference) > max(RELATIVE[kind] * _largest(expected), noise):
            return False
        return summed or _typical(difference) <= _TYPICAL * max(RELATIVE[kind] * _typical(expected), noise)

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
        with _Kinds(self._seen.kinds) as noted, alike_draws(self._number, _MOST_DRAWS * (hi - lo)), regions_ended():
            made = self._call(*given)
        self._inside_bytes = max(self._inside_bytes, noted.made_bytes)
        made = [made] if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]
        made = self._without_operands(made)
        self._made_bytes = max(self._made_bytes, sum(result.nbytes for result in made))
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
        self._results, self._with_rows = len(results), len(results) + len(leaves)
        return [*(result.detach() for result in results), *grads]

    def _without_operands(self, made: Sequence[Tensor]) -> list[Tensor]:
        """The results but those that are operands without rows."""
        places = [self._place_of(result) for result in made]
        self._seen.places = places if self._seen.places is None else self._seen.places
        if places != self._seen.places:
            raise ValueError("it is for the rows to say which operand is a result")
        return [result for result, place in zip(made, places, strict=True) if place is None]

    def _place_of(self, result: Tensor) -> int | None:
        """That of the operand without rows that a result is, if it is one and no gradient comes back for it."""
        if result.requires_grad or result.dim() == 0:
            return None
        alike = (
            place
            for place, item in self._fixed.items()
            if isinstance(item, Tensor) and (item.shape, item.dtype) == (result.shape, result.dtype)
        )
        return next((place for place in alike if torch.equal(self._fixed[place], result)), None)

    @staticmethod
    def _is_constant(result: Tensor) -> bool:
        # What is true of all drawn numbers may be false of a batch, as that there is no infinite one.
        return result.dim() == 0 and not result.requires_grad and result.dtype is not torch.bool

    def _same(self, found: list[Tensor]) -> bool:
        """True when these are what the trials before have given."""
        constants = self._seen.constants
        if not constants:
            constants += found
        return len(found) == len(constants) and all(map(torch.equal, found, constants))


def _bytes_at(rows: int, operands: Sequence[Any]) -> int:
    """What the tensors among operands take."""
    tensors = [operand[:2] for operand in operands if isinstance(operand, tuple) and not isinstance(operand, Dim)]
    return sum(
        tensor.element_size() * math.prod(dim.at(rows) for dim in extents if dim is not None)
        for tensor, extents in tensors
    )


def _random(like: Tensor, shape: Sequence[int], device: torch.device, law: _Law) -> Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return torch.randn(list(shape), dtype=like.dtype, device=device) * law.spread + law.mean
    first = 0 if like.dtype is torch.bool else law.integer
    made = torch.randint(first, first + 2, list(shape), device=device).to(like.dtype)
    # Lengths may have to be sorted, the longest first.
    return made.sort(descending=True).values if first and made.dim() == 1 else made


def _leaf(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.requires_grad_() if copied.is_floating_point() else copied


def _copy(item: Any) -> Any:
    return item.clone() if isinstance(item, Tensor) else item


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _typical(tensor: Tensor) -> float:
    """Its root mean square."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
