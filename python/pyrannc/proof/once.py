"""The captured Graph beside the model itself, once, on a few rows of the batch: one that differs never trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyrannc.call.variant import Variant
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture.nodes.bounds import within_bounds
from pyrannc.capture.nodes.untraceable import has_own_forward
from pyrannc.capture.reads.lacking import Lacking
from pyrannc.capture.user.holders import Name
from pyrannc.capture.user.left import reads_left
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError
from pyrannc.job import agree, process
from pyrannc.job.device_memory import give_back, left_bytes
from pyrannc.proof.left_behind import LeftBehindError, RefusesLeftBehind, refusal
from pyrannc.proof.made import FewRows, Made
from pyrannc.proof.verdict import ALLOWED, relative
from pyrannc.runtime.rows import take_rows

_FEW = 2
_ROUNDING = 10.0
"""A difference below so many times what rounding of the parameters alone makes says nothing."""
_SHARE_OF_FREE = 0.5
_MOST_NOISE = 1e-2
"""Of the largest gradient: how large one may be that is nothing but roundings of terms that cancel each other."""


@dataclass(frozen=True)
class Comparison:
    """What came of it.

    Attributes:
        rows: that were computed; 0 where nothing was.
        why_not: it could not be compared.
        with_gradients: the backward too.
    """

    rows: int = 0
    why_not: str = ""
    with_gradients: bool = False

    def __str__(self) -> str:
        if self.why_not:
            return f"The captured graph was not compared with the model: {self.why_not}."
        what = "outputs and gradients" if self.with_gradients else "outputs"
        rows = f"{self.rows} row{'s' * (self.rows > 1)}"
        return f"The captured graph was compared with the model on {rows} of the first batch: equal {what}."


@dataclass(frozen=True)
class Difference:
    """Of two tensors that should be equal.

    Attributes:
        kind: "output", "buffer" or "gradient".
        name: the output's Value; of a buffer or parameter its own.
        size: of the largest element's.
    """

    kind: str
    name: str | int
    size: float

    @property
    def of(self) -> tuple[str, str | int]:
        """Of what it is."""
        return self.kind, self.name


def compare_once(
    model: nn.Module,
    variant: Variant,
    tensors: Sequence[Tensor],
    batch: BatchRows,
    device: torch.device,
    meanwhile: Callable[[int, int], None],
) -> Comparison | CaptureError:
    """Runs a few rows through the model as it is, and through its captured Graph. All ranks call it.

    One rank computes, which has rows and all parameters. Parameters, buffers, attributes and generators are afterwards
    as they were.

    Args:
        tensors: of this rank's arguments.
        meanwhile: what other ranks with rows do, or else this one before: it is given a share of the work, and how many
            there are.

    Returns:
        The same on all ranks: what came of it, or the error where they differ by more than rounding.
    """
    whole = not any(isinstance(item, Lacking) or item.is_meta for item in (*model.parameters(), *model.buffers()))
    able = [able for (able,) in agree.gather_numbers((int(whole and batch.own_count > 0),))]
    own, rank = process.get_rank(), able.index(1) if any(able) else None
    looking = [other for other, rows in enumerate(batch.per_rank) if rows]
    looking = [other for other in looking if other != rank] or looking

    def compared() -> Comparison | CaptureError:
        if own in looking:
            meanwhile(looking.index(own), len(looking))
        if own != rank:
            return Comparison(why_not="no rank has all parameters")
        try:
            return _compare(model, variant, tensors, batch.per_rank[own], device)
        except CaptureError as error:
            return error

    found: list[Comparison | CaptureError] = agree.gather_objects(agree.together(compared))
    return found[0 if rank is None else rank]


def _compare(
    model: nn.Module, variant: Variant, tensors: Sequence[Tensor], rows: int, device: torch.device
) -> Comparison | CaptureError:
    lacks = _lacks_memory(model, device)
    if lacks:
        return Comparison(why_not=lacks)
    counts = range(min(_FEW, rows), rows + 1)
    fewest = next(filter(variant.stands_for, counts), None)
    most = next(filter(variant.stands_for, reversed(counts)), None)
    if fewest is None or most is None:
        return Comparison(why_not="the model goes by the number of rows, and those of one rank go another way")
    why = ""
    for few in dict.fromkeys((fewest, most)):
        try:
            found = _on_rows(model, variant, tensors, few, device)
        finally:
            give_back(device)
        if isinstance(found, CaptureError) or not found.why_not:
            return found
        why = why or found.why_not
    return Comparison(why_not=why)


def _lacks_memory(model: nn.Module, device: torch.device) -> str:
    """Why a rank cannot hold the whole model beside what is there; none where it lies there already."""
    away = {id(item): item.nbytes for item in (*model.parameters(), *model.buffers()) if item.device != device}
    if device.type != "cuda" or not away:
        return ""
    free = left_bytes(device)
    needed = sum(away.values())
    if needed <= _SHARE_OF_FREE * free:
        return ""
    return f"its parameters have {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free on the device of one rank"


def _on_rows(
    model: nn.Module, variant: Variant, tensors: Sequence[Tensor], rows: int, device: torch.device
) -> Comparison | CaptureError:
    facts = variant.whole.facts
    given = [
        tensor if (row_dim := facts.values[value].row_dim) is None else take_rows(tensor, row_dim, (0, rows))
        for value, tensor in zip(facts.inputs, tensors, strict=True)
    ]
    backward = torch.is_grad_enabled() and variant.trains
    piece = FewRows(model, variant, given, rows, device, backward=backward)
    if not _same_answers(variant, given):
        return Comparison(why_not="the model asks its data, and so few rows answer in another way than the batch")
    try:
        with within_bounds(), RefusesLeftBehind():  # type: ignore[no-untyped-call]  # torch has no types for it
            expected = piece.by_model()
            called = _counts(variant, piece, expected)
    except LeftBehindError as error:
        return refusal(error)
    except CaptureError as error:
        return error
    except Exception as error:  # whatever the user's code raises
        return Comparison(why_not=f"the model does not run on {rows} rows alone: {_line(error)}")
    finally:
        give_back(device)
    if called is not None:
        return reads_left(Place(""), str(called))
    try:
        made = piece.by_graph()
    except torch.OutOfMemoryError:
        return Comparison(why_not="the device has not enough memory")
    finally:
        give_back(device)
    kind = _computed_in(variant)
    allowed = 0.0 if kind is None else ALLOWED[kind]
    worst = [item for item in differences(made, expected) if item.size > allowed]
    if worst and kind is not None and _may_be_noise(worst, expected):
        of_rounding = {
            item.of: item.size for item in differences(piece.by_model(nudged=torch.finfo(kind).eps), expected)
        }
        worst = [item for item in worst if of_rounding.get(item.of, 0.0) * _ROUNDING <= item.size]
    if worst:
        why = _explained(piece, expected, made, worst[0])
        if why:
            return Comparison(why_not=why)
        return _refusal(model, variant, piece, worst[0], rows, allowed)
    return Comparison(rows=rows, with_gradients=backward)


def _counts(variant: Variant, piece: FewRows, expected: Made) -> Name | None:
    """Where a call keeps a tensor on whose account the next one computes something else, if it does."""
    cached = variant.whole.captured.python_state.cached
    kind = _computed_in(variant)
    if not cached:
        return None
    allowed = 0.0 if kind is None else ALLOWED[kind]
    worst = next((item for item in differences(piece.by_second_call(), expected) if item.size > allowed), None)
    if worst is None or _size_of(piece.by_model(), expected, worst) * _ROUNDING > worst.size:
        return None
    return cached[0]


def _same_answers(variant: Variant, tensors: Sequence[Tensor]) -> bool:
    """True when so few rows answer what the model asks its data as the batch does; what cannot be asked may not."""
    if not variant.questions:
        return True
    try:
        variant.questions.ask(tensors).check()
    except Exception:  # a question that such a piece cannot be asked, or another answer
        return False
    return True


def _computed_in(variant: Variant) -> torch.dtype | None:
    """The type with the largest roundings."""
    types = variant.whole.types
    types |= {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    return max(types & ALLOWED.keys(), key=ALLOWED.__getitem__, default=None)


def _may_be_noise(worst: Sequence[Difference], expected: Made) -> bool:
    """True for gradients so small that they may be roundings alone, as that of the bias of an attention's keys."""
    if any(item.kind != "gradient" for item in worst):
        return False
    sizes = {name: _largest(grad) for name, grad in expected.gradients.items()}
    least = _MOST_NOISE * max(sizes.values(), default=0.0)
    return all(sizes.get(str(item.name), 0.0) <= least for item in worst)


def _largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def differences(made: Made, expected: Made) -> Iterator[Difference]:
    """How far apart two computations are: outputs, then buffers, then gradients."""
    for value, tensor in expected.outputs.items():
        yield Difference("output", value, _apart(made.outputs[value], tensor))
    for name, tensor in expected.buffers.items():
        yield Difference("buffer", name, _apart(made.buffers[name], tensor))
    for name in dict.fromkeys([*expected.gradients, *made.gradients]):
        # One of zeros and none are the same.
        other = expected.gradients.get(name)
        one = made.gradients[name] if other is None else made.gradients.get(name, torch.zeros_like(other))
        yield Difference("gradient", name, _apart(one, torch.zeros_like(one) if other is None else other))


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite for tensors that cannot be compared."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = (torch.where(item.isfinite(), item, 0) for item in (one, other))
    return relative(one, other)


def _explained(piece: FewRows, expected: Made, made: Made, first: Difference) -> str:
    """What else than another graph may be the cause of a difference."""
    again = piece.by_model()
    if _size_of(again, expected, first) * _ROUNDING > first.size:
        return "two calls of the model itself differ"
    nudged = piece.by_model(nudged=0.0)
    if _size_of(nudged, expected, first) * _ROUNDING > first.size:
        return "rounding alone changes what it computes as much"
    if made.chance != expected.chance and made.drew and expected.drew:
        return "it draws random numbers in another order"
    return ""


def _size_of(one: Made, other: Made, first: Difference) -> float:
    return next((item.size for item in differences(one, other) if item.of == first.of), 0.0)


def _refusal(
    model: nn.Module, variant: Variant, piece: FewRows, worst: Difference, rows: int, allowed: float
) -> CaptureError:
    """The error, which names the sub-module that differs first."""
    facts = variant.whole.facts
    path = _first_apart(variant, piece, allowed)
    if worst.kind == "output":
        what = f'output "{facts.values[int(worst.name)].name}"'
    else:
        what = f'{worst.kind} "{worst.name}"'
        path = str(worst.name).rpartition(".")[0] if path is None else path
    path = path or ""
    first = f"sub-module '{path}' ({type(model.get_submodule(path)).__name__})" if path else "the model itself"
    while path and not has_own_forward(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    keep = f"leaf_modules=['{path}'] keeps that sub-module whole" if path else "take it out of the model's forward"
    return CaptureError(
        f"the model computes something else when it is captured than when it runs: on {rows} rows of this batch "
        f"{first} is the first that differs (in the end {what}, by {worst.size:.1e} of its largest element). Code that "
        "asks whether it is traced or compiled, or what kind of tensor it has, takes another path then: let both "
        f"compute the same, or {keep}"
    )


def _first_apart(variant: Variant, piece: FewRows, allowed: float) -> str | None:
    """Path of the first sub-module to end from which the Graph has something come that it has not returned."""
    heard: dict[str, list[Tensor]] = {}
    piece.by_model(heard=lambda path, results: heard.setdefault(path, []).extend(results))
    facts, captured = variant.whole.facts, variant.whole.captured
    places = [captured.place(op).module for op in range(len(facts.ops))]
    maker = {value: places[op] for op, made in enumerate(facts.ops) for value in made.results}
    users: dict[int, list[str]] = {value: [] for value in maker}
    for place, op in zip(places, facts.ops, strict=True):
        for value in op.operands:
            users.get(value, []).append(place)
    for value in facts.outputs:
        users.get(value, []).append("")
    values = piece.by_graph(values=[*maker]).values
    for path, results in heard.items():
        inside = f"{path}." if path else ""
        for value, tensor in values.items():
            leaves = _is_in(maker[value], path, inside) and not all(_is_in(u, path, inside) for u in users[value])
            if leaves and not any(_apart(tensor, result) <= allowed for result in results):
                return path
    return None


def _is_in(place: str, path: str, inside: str) -> bool:
    return place == path or place.startswith(inside)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
