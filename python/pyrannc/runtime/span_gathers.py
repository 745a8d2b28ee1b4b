"""Parameters that are kept in parts are gathered before a Span computes with them, one Span ahead, and freed after it.
The first of those that stay whole to the end of a run are gathered from its begin on, while it may still wait for its
inputs.

In a forward, code of the Stage says which Span comes; in a backward, the gradients of what a Span has given do. Ranks
gather in the same order, whatever they compute: what a backward does not come to is gathered at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import StagePart
from pyrannc.errors import PlanError
from pyrannc.store.gathered import GatheredBucket
from pyrannc.store.working_copies import Key

Versions = tuple[int, ...]
_SPANS_AT_BEGIN = 4
"""Whose parameters are gathered before the first one computes. In a CUDA graph, what waits for one of very many
messages waits for most of them: the device has few queues."""


class SpanGathers:
    """Those of one Stage.

    Args:
        needs: by Span, the buckets that it computes with.
        types: in which Spans compute with each bucket.
    """

    def __init__(
        self, needs: Sequence[Sequence[GatheredBucket]], types: Mapping[GatheredBucket, Sequence[torch.dtype]]
    ) -> None:
        self._needs = needs
        self._types = types
        self._spans = [place for place, buckets in enumerate(needs) if buckets]
        self._order: list[int] = []
        self._issued = 0
        self._backward = False

    # In a forward

    def before(self, span: int) -> None:
        """A Span is about to compute."""
        if span == 0:
            self._begin(self._spans)
        if self._needs[span]:
            self._reach(self._order.index(span))

    def after(self, span: int, results: Any) -> None:
        """It has, with these results."""
        if torch.is_grad_enabled():
            versions = self._versions(span)
            for result in results if isinstance(results, tuple) else (results,):
                if isinstance(result, Tensor) and result.requires_grad:
                    result.register_hook(lambda _: self._enter(span, versions))  # type: ignore[no-untyped-call]  # torch has no types for it
        if span == len(self._needs) - 1:
            self._end()

    def _versions(self, span: int) -> Versions:
        return tuple(bucket.version for bucket in self._needs[span])

    # In a backward

    @contextmanager
    def backward(self) -> Iterator[None]:
        """A backward of the Stage runs inside."""
        self._begin(self._spans[::-1])
        self._backward = True
        try:
            yield
        finally:
            self._backward = False
            self._reach_all()

    def _enter(self, span: int, versions: Versions) -> None:
        """The backward comes to a Span, maybe not for the first time."""
        if not self._backward or not self._needs[span]:
            return
        for bucket, before in zip(self._needs[span], versions, strict=True):
            bucket.refuse_changed(before)
        place = self._order.index(span)
        if place + 1 >= self._issued:
            self._reach(place)

    # Without rows

    def pass_by(self, *, backward: bool) -> None:
        """Takes part in what the other ranks gather for a microbatch of which this one has no rows."""
        self._begin(self._spans[::-1] if backward else self._spans)
        self._reach_all()

    def begin_run(self, *, backward: bool) -> None:
        """Ends what a run that broke off has left, and starts to gather what stays whole to the end of this one for
        the Spans that come first.

        Args:
            backward: no forward comes, so that the last Span is the first that computes.
        """
        for bucket in self._types:
            bucket.release()
        order = self._spans[::-1] if backward else self._spans
        for span in order[:_SPANS_AT_BEGIN]:
            for bucket in self._needs[span]:
                if bucket.is_kept:
                    bucket.start(self._types[bucket])

    def end_run(self) -> None:
        """No computation follows: frees what has stayed whole."""
        for bucket in self._types:
            bucket.release()

    # The gathering

    def _begin(self, order: Sequence[int]) -> None:
        self._end()
        self._order, self._issued = list(order), 0

    def _reach(self, place: int) -> None:
        """Gathers all up to the Span after a place of the order, and frees what lies before it first."""
        while self._issued < min(place + 2, len(self._order)):
            if self._issued > 1:
                self._free(self._issued - 2)
            for bucket in self._needs[self._order[self._issued]]:
                bucket.start(self._types[bucket])
            self._issued += 1
        for bucket in self._needs[self._order[place]]:
            bucket.wait()

    def _free(self, place: int) -> None:
        """Frees what a Span needs, unless the two after it do."""
        coming = [bucket for span in self._order[place + 1 : place + 3] for bucket in self._needs[span]]
        for bucket in self._needs[self._order[place]]:
            if bucket not in coming:
                bucket.let_go()

    def _reach_all(self) -> None:
        for place in range(max(self._issued - 1, 0), len(self._order)):
            self._reach(place)
        self._end()

    def _end(self) -> None:
        for span in self._order:
            for bucket in self._needs[span]:
                bucket.let_go()
        self._order = []

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is gathered inside: what is computed is not of use."""
        for bucket in self._types:
            bucket.is_alone = True
        try:
            yield
        finally:
            for bucket in self._types:
                bucket.is_alone = False


def gathers_of(
    facts: GraphFacts,
    once: StagePart | None,
    each: StagePart,
    copies: Mapping[int, Key],
    gathered: Mapping[str, GatheredBucket],
) -> SpanGathers | None:
    """What each Span of a Stage computes with of parameters that are kept in parts; None where there are none.

    Args:
        once: what runs once a step.
        each: what runs for each microbatch.
        copies: the working copies that both take, by Value.
        gathered: by name, the parameters that are kept in parts.

    Raises:
        PlanError: one of them is needed once a step.
    """
    if not gathered:
        return None
    keys: dict[int, tuple[str, torch.dtype | None]] = {
        facts.params[i].value: (facts.params[i].names[0], None) for i in each.params
    }
    keys |= copies
    early = [] if once is None else [value for op in once.ops for value in facts.ops[op].operands if value in keys]
    refused = [keys[value][0] for value in early if keys[value][0] in gathered]
    if refused:
        raise PlanError(
            f'this call computes with parameter "{refused[0]}" once a step, which the call that the plan was made '
            "for did not, so it cannot be kept in parts; keep parameters whole with RANNC_ENABLE_ZERO=2"
        )
    needs: list[list[GatheredBucket]] = []
    types: dict[GatheredBucket, dict[torch.dtype, None]] = {}
    for span in each.spans:
        used = [keys[value] for value in span.takes if value in keys and keys[value][0] in gathered]
        needs.append(list(dict.fromkeys(gathered[name] for name, _ in used)))
        for name, dtype in used:
            bucket = gathered[name]
            types.setdefault(bucket, {})[bucket.dtype if dtype is None else dtype] = None
    return SpanGathers(needs, {bucket: list(found) for bucket, found in types.items()})
