"""Gradients set aside until the user asks for them, and their sum over ranks.

Parameters are used through leaves of our own that share their memory, so that nothing shows in ``.grad`` before the
user's ``backward()``. What a backward leaves on the leaves of a bucket is written to the bucket, or added to it, in
one kernel, as soon as it is there; after the last microbatch's the bucket is summed over the ranks that hold its
parameters (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.gradients import at_end_of_backward
from pyrannc.job import process
from pyrannc.job.exchange import Group, Work, start_sum, sum_over_ranks
from pyrannc.log import get_logger
from pyrannc.store.buckets import Bucket, SharedParam
from pyrannc.store.course import note_backward
from pyrannc.store.delivery import Delivery
from pyrannc.store.gathered import GatheredBucket
from pyrannc.store.gradient_set import GradientSet
from pyrannc.store.leaf import leaf_of
from pyrannc.store.scale import scale_each
from pyrannc.store.spread_sums import SpreadSums
from pyrannc.store.unsummed import mark_summed, mark_unsummed
from pyrannc.store.working_copies import Key, WorkingCopies

_log = get_logger("ParamStorage")


class Gradients:
    """Gradients of the parameters that this rank holds.

    Args:
        params: all that this rank holds, in the order in which the model's forward first uses them.
        buckets: of those that are trained, in the order in which they are summed.
        gathered: by name, parameters of which each rank keeps a part.
        group: the process group of some ranks.

    Attributes:
        leaves: what Stages compute with, by name.
        delivery: the way to ``.grad``.
        spread: names of parameters of whose gradients each rank keeps a part.
        gathered: as given.
        pending: what stands in ``.grad`` has not been summed over ranks.
        second_bytes: of a second set of gradients, which the Plan does not count: 0 until somebody holds the first one
            while the next is filled.
        nothing: a parameter without elements, for scripts on a rank that holds none.
    """

    def __init__(
        self,
        params: Sequence[SharedParam],
        buckets: Sequence[Bucket],
        gathered: Mapping[str, GatheredBucket],
        group: Callable[[tuple[int, ...]], Group | None],
    ) -> None:
        self._params = params
        self.leaves = {
            name: gathered[name].leaves[name] if name in gathered else leaf_of(param)
            for name, param in [(shared.name, shared.param) for shared in params]
        }
        trainable = [shared for shared in params if shared.param.requires_grad]
        self._buckets = buckets
        self._index_of = {bucket.number: index for index, bucket in enumerate(buckets)}
        self._copies: Mapping[str, Tensor] = {}
        self._leaves_of = self._leaves_with(self._copies)
        self._place = {s.name: (i, p) for i, b in enumerate(self._buckets) for p, s in enumerate(b.params)}
        self._groups = {bucket.ranks: group(bucket.ranks) for bucket in self._buckets}
        self._filling: weakref.ref[GradientSet] | None = None
        self._works: list[tuple[Work, Tensor, Tensor]] = []
        self._scattering: deque[SpreadSums] = deque()
        self._open: dict[int, int] = {}  # Buckets that a backward fills, with how many of its gradients have come.
        self._late: Set[int] = frozenset()
        self._due: deque[int] = deque()
        self._started: set[int] = set()
        self.pending = False
        self.second_bytes = 0
        self.working = WorkingCopies(self.leaves, gathered)
        self.gathered = gathered
        self.nothing = nn.Parameter(torch.zeros(0, device="cpu"))
        self.spread = {shared.name for bucket in buckets if bucket.is_spread for shared in bucket.params}
        self.delivery = Delivery(trainable, self.spread, self.nothing)
        for name in self._place:
            self._watch(name, self.leaves[name])

    def _watch(self, name: str, leaf: Tensor) -> None:
        leaf.register_post_accumulate_grad_hook(self._hook(self._place[name][0]))  # type: ignore[no-untyped-call]  # torch has no types for it

    def working_copies(self, keys: Collection[Key]) -> dict[str, Tensor]:
        """What a Stage computes with in the place of leaves, by name: copies that are to be refreshed."""
        made = {}
        for key in keys:
            is_new, name = key not in self.working, key[0]
            made[name] = self.working.of(key)
            if is_new and name in self._place:
                self._watch(name, made[name])
        return made

    def _leaves_with(self, copies: Mapping[str, Tensor]) -> list[list[Tensor]]:
        """By bucket, where backwards leave gradients."""
        return [
            [copies.get(shared.name, self.leaves[shared.name]) for shared in bucket.params] for bucket in self._buckets
        ]

    # While backwards run

    def new_set(self) -> GradientSet:
        """Room for gradients that only who asks for it writes to."""
        return GradientSet(self._buckets, is_kept=True)

    def begin(self, copies: Mapping[str, Tensor], current: GradientSet | None = None) -> GradientSet:
        """Room for the gradients of a new step; backwards write to it from now on.

        Args:
            copies: the working copies that its Stage computes with, by name.
            current: the room; by default any that nobody holds.
        """
        if self._filling is not None:
            self._clear_leaves()
            self._await_sums()
        if copies is not self._copies:
            self._copies, self._leaves_of = copies, self._leaves_with(copies)
        if current is None:
            current = self._free_set()
        current.begin()
        self._filling = weakref.ref(current)
        self._due.clear()
        self._open.clear()
        self._started.clear()
        return current

    def _free_set(self) -> GradientSet:
        spare = self.delivery.take_spare()
        if spare is not None and not spare.is_held:
            return spare
        if spare is not None:
            self.note_second(spare)
        return GradientSet(self._buckets)

    def note_second(self, held: GradientSet) -> None:
        """Tells once what it costs that a script still holds gradients."""
        if not self.second_bytes and held.nbytes:
            self.second_bytes = held.nbytes
            _log.info(
                "the gradients of a step are still held while the next step fills its own, which takes "
                f"{held.nbytes / 2**20:.1f} MiB more on this rank than the plan counts; unless they are to add up, "
                "call optimizer.zero_grad() before the model, not between the model and loss.backward()"
            )

    def _await_sums(self) -> None:
        """Of a step that failed, whose gradients may lie where those of the next one are to be written."""
        self._finish_scattering()
        for work, _, _ in self._works:
            work.wait()
        self._works.clear()

    def forget_sums(self) -> None:
        """Of a recording that failed: nothing was summed."""
        self._works.clear()
        self._scattering.clear()

    def _clear_leaves(self) -> None:
        """After a step that failed."""
        for leaf in self.leaves.values():
            leaf.grad = None
        for bucket in self.gathered.values():
            bucket.clear()
        self.working.clear()

    def buckets_of(self, names: Collection[str]) -> frozenset[int]:
        """The buckets of some parameters, as far as these are trained."""
        return frozenset(self._place[name][0] for name in names if name in self._place)

    def expect(self, late: Set[int]) -> None:
        """Says that the backward of a microbatch comes now; waits for what the last one has left to sum in parts.

        Args:
            late: buckets to which a second backward adds, before :meth:`collect`.
        """
        self._finish_scattering()
        self._open, self._late = dict.fromkeys(range(len(self._buckets)), 0), late

    def collect(self, current: GradientSet) -> None:
        """Takes what the backward of a microbatch has left on the leaves, and starts the sums that are due."""
        for index in self._open:
            self._take(current, index, whole=False)
        self._open.clear()
        self._start_due(current)

    def _take(self, current: GradientSet, index: int, *, whole: bool) -> bool:
        """Takes the gradients of a bucket off the leaves; if ``whole``, only when all have come."""
        leaves = self._leaves_of[index]
        grads = [leaf.grad for leaf in leaves]
        found = [(place, grad) for place, grad in enumerate(grads) if grad is not None]
        if whole and len(found) < len(grads) - self._count_complete(current, index):
            return False
        if found:
            dense = [grad.to_dense() if grad.is_sparse else grad for _, grad in found]
            current.put(index, [place for place, _ in found], dense)
            for place, _ in found:
                leaves[place].grad = None
        return True

    def _count_complete(self, current: GradientSet, index: int) -> int:
        if not current.complete:
            return 0
        return sum(shared.name in current.complete for shared in self._buckets[index].params)

    def add(self, current: GradientSet, name: str, grad: Tensor | None, *, last: bool) -> None:
        """Adds a gradient that does not come from the backward of a microbatch.

        Args:
            grad: none where none came.
            last: no such backward adds to it.
        """
        index, place = self._place[name]
        if grad is not None:
            current.put(index, [place], [grad])
        if last:
            current.complete.add(name)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        # Python's collector does not see the way from a tensor to its hooks, and could never free a cycle.
        owner = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                gradients._note_arrival(index)

        return arrived

    def _note_arrival(self, index: int) -> None:
        current = self._filling() if self._filling is not None else None
        if current is None or index not in self._open or index in self._late:
            return
        # A node of autograd may have many parameters, whose gradients then come in any order.
        self._open[index] += 1
        missing = len(self._leaves_of[index]) - self._count_complete(current, index) - self._open[index]
        if missing > 0:
            return
        # Others start these sums in backwards too, which wait for nothing that this rank does later.
        self._finish_other_spans(current, index)
        if self._take(current, index, whole=True):
            del self._open[index]
            self._start_due(current)

    # Sums over ranks

    def _finish_scattering(self) -> None:
        """Waits for sums in parts, and lets go of what was summed."""
        while self._scattering:
            self._scattering.popleft().finish()

    def _finish_other_spans(self, current: GradientSet, index: int) -> None:
        """Likewise, before a bucket takes memory, for those of other Spans: all of one Span's come together."""
        coming = current.spread.get(index)
        if coming is None:
            return
        for sums in [sums for sums in self._scattering if not sums.is_of_span_of(coming)]:
            self._scattering.remove(sums)
            sums.finish()

    def sum(self, current: GradientSet, bucket: int, *, filled: bool) -> None:
        """Starts the sum of a bucket over the ranks that hold its parameters, in the order of the calls.

        Of a spread bucket it is that of what one microbatch adds.

        Args:
            bucket: number among all of the job.
            filled: nothing adds to it any more; otherwise the backward that comes next does, and the sum starts as soon
                as that has filled it.
        """
        self._due.append(self._index_of[bucket])
        if filled:
            self._start_due(current)

    def _start_due(self, current: GradientSet) -> None:
        while self._due and self._due[0] not in self._open:
            index = self._due.popleft()
            bucket = self._buckets[index]
            self._started.add(index)
            if index in current.spread:
                current.spread[index].start(self._groups[bucket.ranks])
                self._scattering.append(current.spread[index])
                continue
            sums, message = current.bucket(index), current.message(index)
            self._works.append((start_sum(message, self._groups[bucket.ranks]), sums, message))

    def finish(self, current: GradientSet) -> None:
        """Ends the filling, and waits for all sums (on a GPU: makes the stream wait)."""
        self._finish_scattering()
        for index in range(len(self._buckets)):
            if index not in self._started:
                current.clear(index)
        self._filling = None
        for work, sums, message in self._works:
            work.wait()
            if message is not sums:
                sums.copy_(message)
        self._works.clear()

    # For the user

    def deliver(
        self, current: GradientSet, active: Set[str], scale: Tensor | None, *, keep: bool, summed: bool, sum_now: bool
    ) -> None:
        """Gives the gradients, times ``scale``, to the node that leads to the parameters.

        Args:
            active: the parameters that get a gradient on some rank; the others get none.
            keep: leave ``current`` as it is, to be delivered once more.
            summed: ``current`` has been summed over ranks.
            sum_now: what is delivered is to be summed; otherwise a later reduction does that.
        """
        if sum_now and not summed:
            self._sum_all(current)
        if sum_now:
            self.reduce_pending()
        else:
            if not self.pending:
                self._share_out()
                self.pending = True
            at_end_of_backward(self._mark_pending)
        given = current.copy() if keep else current
        if summed and not sum_now:
            # The reduction to come sums them once more.
            for index, bucket in self._summed_whole():
                given.bucket(index).div_(len(bucket.ranks))
        if scale is not None:
            scale_each(list(given.flats.values()), scale)
        given.settle()
        note_backward()
        self.delivery.give(given, active)

    def _sum_all(self, current: GradientSet) -> None:
        for index, _ in self._summed_whole():
            self._sum_now(current, index)

    def _sum_now(self, current: GradientSet, index: int) -> None:
        sums, message = current.bucket(index), current.message(index)
        sum_over_ranks(message, self._groups[self._buckets[index].ranks])
        if message is not sums:
            sums.copy_(message)

    def reduce_pending(self) -> None:
        """Sums over ranks what stands in ``.grad`` and is not summed, but for what is summed in parts, at once.

        All ranks call it.
        """
        if not self.pending:
            return
        mark_summed(shared.param for shared in self._params)
        whole = GradientSet(self._buckets)
        whole.begin()
        for index, bucket in self._summed_whole():
            present = [(place, s.param.grad) for place, s in enumerate(bucket.params) if s.param.grad is not None]
            grads = [grad for _, grad in present]
            whole.put(index, [place for place, _ in present], grads)
            self._sum_now(whole, index)
            whole.read(index, [place for place, _ in present], grads)
        self.pending = False

    def _share_out(self) -> None:
        """Divides what is summed already by the number of ranks, so that the reduction to come restores it."""
        for _, bucket in self._summed_whole():
            for shared in bucket.params:
                if shared.param.grad is not None:
                    shared.param.grad.div_(len(bucket.ranks))

    def _mark_pending(self) -> None:
        """At the end of a backward: what no scaler can judge, unless it has been summed since."""
        if self.pending and process.get_world_size() > 1:
            mark_unsummed(shared.param for shared in self._params)

    def _summed_whole(self) -> Iterator[tuple[int, Bucket]]:
        """The buckets that several ranks sum and each of them has all of, with their places."""
        for index, bucket in enumerate(self._buckets):
            if len(bucket.ranks) > 1 and not bucket.is_spread:
                yield index, bucket
