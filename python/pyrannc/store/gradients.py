"""Gradients set aside until the user asks for them, and their sum over ranks.

Parameters are used through leaves of our own that share their memory, so that nothing shows in
``.grad`` before the user's ``backward()``. Gradients lie in buckets of one flat tensor each; a bucket is
summed over the ranks that hold its parameters as soon as the last microbatch has filled it
(Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pyrannc.job.exchange import Group, Work, start_sum, sum_over_ranks
from pyrannc.store.buckets import Bucket, SharedParam, divide
from pyrannc.store.leaf import leaf_of


@dataclass
class GradientSet:
    """The gradients of one step: a flat tensor for each bucket, and its views by parameter name.

    Attributes:
        touched: parameters that a gradient has come for.
        complete: those to which no backward of a microbatch adds.
    """

    flats: list[Tensor]
    views: dict[str, Tensor]
    touched: set[str] = field(default_factory=set)
    complete: set[str] = field(default_factory=set)
    works: list[Work] = field(default_factory=list)


class Gradients:
    """Gradients of the parameters that this rank holds.

    Args:
        params: in the order in which the whole model's forward first uses them, which is the same on all ranks.
        stage_ranks: the ranks of this rank's Stage. Their buckets are summed during the backward; those of
            parameters that other Stages hold too, after it.
        group: the process group of some ranks; called in the same order on all of them.

    Attributes:
        nothing: a parameter without elements, for scripts on a rank that holds none.
    """

    def __init__(
        self,
        params: Sequence[SharedParam],
        stage_ranks: tuple[int, ...],
        group: Callable[[tuple[int, ...]], Group | None],
    ) -> None:
        self._params = {shared.name: shared for shared in params}
        self._stage_ranks = stage_ranks
        self.leaves = {shared.name: leaf_of(shared.param) for shared in params}
        trainable = [shared for shared in params if shared.param.requires_grad]
        self._buckets = divide(list(reversed(trainable)), stage_ranks)
        self._groups = {bucket.ranks: group(bucket.ranks) for bucket in self._buckets}
        self._bucket_of = {name: index for index, bucket in enumerate(self._buckets) for name in _names(bucket)}
        self._spare: GradientSet | None = None
        self._filling: weakref.ref[GradientSet] | None = None
        self._reducing = False
        self._missing: list[int] = []
        self._next = 0
        self.pending = False
        self.nothing = nn.Parameter(torch.zeros(0))
        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]  # torch has no types for it

    def begin(self) -> GradientSet:
        """Zeroed gradients for a new step; backwards add to them from now on."""
        current = self._take()
        for name, view in current.views.items():
            self.leaves[name].grad = view
        self._filling = weakref.ref(current)
        self._reducing = False
        return current

    def expect_last(self) -> None:
        """Says that the backward that comes now is the step's last.

        Each bucket is summed over ranks as soon as it is full, always in the same order.
        """
        current = self._filling() if self._filling is not None else None
        complete = current.complete if current is not None else set()
        self._missing = [sum(shared.name not in complete for shared in bucket.params) for bucket in self._buckets]
        self._next = 0
        self._reducing = True

    def add(self, current: GradientSet, name: str, grad: Tensor, *, last: bool) -> None:
        """Adds a gradient that does not come from the backward of a microbatch.

        Args:
            last: no such backward adds to it.
        """
        current.views[name].add_(grad)
        current.touched.add(name)
        if last:
            current.complete.add(name)

    def reduce(self, current: GradientSet) -> None:
        """Sums what has not been summed yet, and waits for all sums (on a GPU: makes the stream wait)."""
        if not self._reducing:
            self._next = 0
        self._launch(current, len(self._buckets))
        self._reducing = False
        self.settle(current)
        for work in current.works:
            work.wait()
        current.works.clear()

    def settle(self, current: GradientSet) -> None:
        """Ends the filling: takes the gradients off the leaves."""
        for name in current.views:
            self.leaves[name].grad = None
        self._filling = None

    def deliver(
        self, current: GradientSet, active: Set[str], scale: Tensor | None, *, keep: bool, reduced: bool
    ) -> None:
        """Adds the gradients, times ``scale``, to ``.grad``.

        Args:
            active: the parameters that get a gradient on some rank; the others keep ``None``.
            keep: leave ``current`` as it is, to be delivered once more.
            reduced: False when ``current`` has not been summed over ranks; a later reduction does that.
        """
        if reduced and self.pending:
            self.reduce_delivered()
        elif not reduced and not self.pending:
            self._share_out()
            self.pending = True
        flats = [flat.clone() for flat in current.flats] if keep else current.flats
        if scale is not None:
            for flat in flats:
                flat.mul_(scale)
        views = self._views(flats) if keep else current.views
        for name, view in views.items():
            param = self._params[name].param
            if name not in active or not param.requires_grad:
                continue
            if param.grad is None:
                param.grad = view
            else:
                param.grad.add_(view)
        if not self._params:
            self.nothing.grad = torch.zeros(0)
        if not keep:
            self._spare = current

    def reduce_delivered(self) -> None:
        """Sums over ranks what stands in ``.grad``."""
        for bucket in self._buckets:
            group = self._groups[bucket.ranks]
            if len(bucket.ranks) == 1:
                continue
            flat = bucket.zeros()
            views = bucket.views(flat)
            present = [(self._params[name].param.grad, view) for name, view in views.items()]
            for grad, view in present:
                if grad is not None:
                    view.copy_(grad)
            sum_over_ranks(flat, group)
            for grad, view in present:
                if grad is not None:
                    grad.copy_(view)
        self.pending = False

    def _share_out(self) -> None:
        """Divides what is summed already by the number of ranks, so that the reduction to come restores it."""
        for shared in self._params.values():
            if shared.param.grad is not None:
                shared.param.grad.div_(len(shared.ranks))

    def _take(self) -> GradientSet:
        spare, self._spare = self._spare, None
        if spare is not None and not self._is_exposed(spare):
            for flat in spare.flats:
                flat.zero_()
            spare.touched.clear()
            spare.complete.clear()
            return spare
        flats = [bucket.zeros() for bucket in self._buckets]
        return GradientSet(flats, self._views(flats))

    def _is_exposed(self, spare: GradientSet) -> bool:
        """True when the user still sees the gradients of an earlier step."""
        return any(self._params[name].param.grad is view for name, view in spare.views.items())

    def _views(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for bucket, flat in zip(self._buckets, flats, strict=True):
            views.update(bucket.views(flat))
        return views

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        # Python's collector does not see the way from a tensor to its hooks, and could never free a cycle.
        owner = weakref.ref(self)

        def filled(_: Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                gradients._note_filled(name)

        return filled

    def _note_filled(self, name: str) -> None:
        current = self._filling() if self._filling is not None else None
        if current is None:
            return
        current.touched.add(name)
        if self._reducing:
            self._missing[self._bucket_of[name]] -= 1
            self._launch_full(current)

    def _launch_full(self, current: GradientSet) -> None:
        end = self._next
        while end < len(self._buckets) and self._missing[end] <= 0 and self._buckets[end].ranks == self._stage_ranks:
            end += 1
        self._launch(current, end)

    def _launch(self, current: GradientSet, end: int) -> None:
        while self._next < end:
            bucket = self._buckets[self._next]
            if len(bucket.ranks) > 1:
                current.works.append(start_sum(current.flats[self._next], self._groups[bucket.ranks]))
            self._next += 1


def _names(bucket: Bucket) -> list[str]:
    return [shared.name for shared in bucket.params]
