"""Calls that differ in extents besides the rows: one trace serves them all where the model allows it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from pyrannc.call.batch_arguments import PerRow
from pyrannc.call.guards import ModuleGuards
from pyrannc.call.variant import RowMixing, Variant
from pyrannc.call.variants import CallKey, Variants, extents_of, kind_of
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import (
    CaptureError,
    CaptureOptions,
    FixedLengthError,
    LengthTrace,
    Sample,
    Trace,
    Tracing,
    trace,
)
from pyrannc.errors import MismatchError, RaNNCError, first_line
from pyrannc.job import agree, process
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")
_MOST_TRACES = 4
"""Of one kind of call: as many as there are ways that a model goes by its lengths, and those that fail."""
_MOST_KINDS = 64
"""A script may pass another number with each call."""
_LEAST = 2


@dataclass(frozen=True)
class Wanted:
    """A captured form that is to be made: the arguments of :class:`Variant`."""

    sample: Sample
    batch: BatchRows
    row_mixing: RowMixing
    options: CaptureOptions

    def variant(self, tracing: Tracing = trace) -> Variant:
        """It. All ranks call it."""
        return Variant(self.sample, self.batch, self.row_mixing, self.options, tracing)

    def traced(self, free: list[list[int]]) -> LengthTrace:
        """A trace in which some dimensions of the call's tensors may have any extents."""
        outputs = self.options.outputs if self.sample.model.training else None
        return LengthTrace(self.sample, free, outputs=outputs)

    def resized(self, key: CallKey) -> Sample:
        """A call of zeros with the extents of another one, and as many rows."""
        tensors, structure = self.sample.flat()
        shapes = [
            (*tensor.shape[:1], *extents) if count else extents
            for tensor, count, extents in zip(tensors, self.sample.per_row, extents_of(key), strict=True)
        ]
        made = [t.detach().new_zeros(s).requires_grad_(t.requires_grad) for t, s in zip(tensors, shapes, strict=True)]
        args, kwargs = structure.rebuild(made)
        return replace(self.sample, args=args, kwargs=kwargs)


@dataclass
class _Kind:
    """Of calls that differ in lengths only.

    Attributes:
        traces: what serves their lengths, the last one first.
        tries: how many traces were tried.
        why: the last one did not serve.
    """

    traces: list[Tracing] = field(default_factory=list)
    tries: int = 0
    why: str = ""


class Lengths:
    """What serves the lengths of calls."""

    def __init__(self, variants: Variants) -> None:
        self._variants = variants
        self._kinds: dict[Hashable, _Kind] = {}

    def clear(self) -> None:
        """Forgets all."""
        self._kinds.clear()

    def give_up(self, key: CallKey, why: str) -> None:
        """From now on calls like this one are traced for themselves."""
        self._kinds[kind_of(key)] = _Kind(tries=_MOST_TRACES, why=why)

    def variant(self, key: CallKey, wanted: Wanted, tell: Callable[[str], None]) -> Variant:
        """The captured form of a call that has none. All ranks call it.

        Args:
            tell: says that the call is traced for itself, and why no other trace serves its lengths.
        """
        kind = self._kinds[kind_of(key)] = self._kinds.pop(kind_of(key), _Kind())
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        # Ranks whose lengths differ will hear of it.
        if len(set(agree.gather_objects(extents_of(key)))) == 1:
            found = self._served(kind, key, wanted)
            if found is not None:
                return found
        tell(kind.why)
        return wanted.variant()

    def _served(self, kind: _Kind, key: CallKey, wanted: Wanted) -> Variant | None:
        for tracing in kind.traces:
            try:
                return wanted.variant(tracing)
            except (CaptureError, MismatchError) as error:
                kind.why = str(error).partition("\n")[0]
        free = self._free(key, wanted.sample.per_row)
        if not free or kind.tries == _MOST_TRACES:
            return None
        kind.tries += 1
        try:
            tracing = agree.together(lambda: self._traced(key, wanted, free))
            found = wanted.variant(tracing)
        except (CaptureError, MismatchError) as error:
            kind.why = str(error).partition("\n")[0]
            return None
        kind.traces.insert(0, tracing)
        if process.get_rank() == 0:
            _log.info("the lengths of tensors change: from now on one trace serves %s", tracing)
        return found

    def _free(self, key: CallKey, per_row: PerRow) -> list[list[int]]:
        """By tensor, the dimensions that have had other extents; none where some are equal for this call alone."""
        now = _flat(key)
        others = [_flat(known) for known, _ in self._variants.like(key)]
        free = {place for other in others for place, size in now.items() if other[place] != size}
        apart = (
            now[one] == now[two] and any(other[one] != other[two] for other in others) for one in free for two in free
        )
        if not free or any(now[place] < _LEAST for place in free) or any(apart):
            return []
        firsts = enumerate(int(count > 0) for count in per_row)
        return [[first + place for tensor, place in sorted(free) if tensor == number] for number, first in firsts]

    def _traced(self, key: CallKey, wanted: Wanted, free: list[list[int]]) -> _Guarded:
        """A trace for any lengths, with which a call of other lengths is captured as it was.

        Raises:
            CaptureError: there is none.
        """
        own = [(other, variant) for other, variant in self._variants.like(key) if variant.has_own_trace]
        known = [(other, variant) for other, variant in own if variant.guards.hold()]
        if not known:
            raise FixedLengthError("the model has changed since calls of other lengths")
        whole = known[0][1].whole.captured.leaves
        if whole:
            raise FixedLengthError(f"'{whole[0]}' stays whole")
        try:
            tracing = _Guarded(wanted.sample.model, wanted.traced(free))
            if any(_gives_again(tracing, wanted, *one) for one in known):
                return tracing
        except RaNNCError:
            raise
        except Exception as error:  # whatever torch has against symbols
            raise FixedLengthError(first_line(error)) from error
        raise FixedLengthError("it goes by its lengths, and by those of earlier calls in another way")


def _gives_again(tracing: _Guarded, wanted: Wanted, key: CallKey, known: Variant) -> bool:
    """True when an earlier call is captured as it was; false where the trace does not stand for its lengths.

    Raises:
        CaptureError: it is captured as something else.
    """
    try:
        _, same = known.captured_again(wanted.resized(key), tracing)
    except FixedLengthError:
        return False
    if not same:
        raise FixedLengthError("the model computes something else where its lengths are symbols")
    return True


class _Guarded:
    """A trace that stands only for as long as the model's Python side is as it was."""

    def __init__(self, model: nn.Module, traced: LengthTrace) -> None:
        self._traced = traced
        self._guards = ModuleGuards(model, traced.python_state)

    def __call__(self, *args: Any) -> Trace:
        if not self._guards.hold():
            raise FixedLengthError(f"{self._guards.changed() or 'a sub-module'} has changed")
        return self._traced(*args)

    def __str__(self) -> str:
        return str(self._traced)


def _flat(key: CallKey) -> dict[tuple[int, int], int]:
    """The extents of a call besides the rows, by tensor and place."""
    return {(number, place): size for number, sizes in enumerate(extents_of(key)) for place, size in enumerate(sizes)}
