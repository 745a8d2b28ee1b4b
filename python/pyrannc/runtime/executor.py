"""Runs one rank's Actions, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyrannc.core.program import (
    Action,
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Recv,
    ReduceScatter,
    Send,
)
from pyrannc.runtime.batch import Batch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.seat import Seat, Seeds
from pyrannc.runtime.timing import Marks
from pyrannc.store.gradient_set import GradientSet


class Executor:
    """The Actions of one step.

    Args:
        context: the rank's Stage.
        seat: computes, and exchanges messages with other Stages.
        batch: comes from the ranks, and goes back to them.
        marks: where to note when gradients have been summed.
    """

    def __init__(self, context: StageContext, seat: Seat, batch: Batch, marks: Marks | None) -> None:
        self._context = context
        self._seat = seat
        self._batch = batch
        self._marks = marks
        once = context.prologue
        self._passed: set[tuple[int, str]] = set()
        self._late = frozenset() if once is None else context.gradients.buckets_of(once.params)

    def run(
        self,
        actions: Sequence[Action],
        current: GradientSet | None,
        seeds: Seeds,
        *,
        first_record: int = 0,
        keep_graph: bool = False,
        reduce: bool = True,
        when_forward: Callable[[], None] | None = None,
    ) -> None:
        """Runs Actions in order.

        Args:
            current: where gradients go; ``None`` for a run without backwards.
            seeds: the gradient of an output of a microbatch, by microbatch and Value.
            first_record: place of the first Action in the record.
            keep_graph: backwards leave the autograd graph alive.
            reduce: sum gradients over ranks, but for what is summed in parts, which always is.
            when_forward: what to do once all forwards have been done and their Values are on their way; where no other
                ranks wait for messages of this kind, at the end.
        """
        gradients = self._context.gradients
        self._passed.clear()
        if self._context.code.watch is not None:
            self._context.code.watch.begin_run(backward=not any(map(_is_forward, actions)))
        ends = (i for i, action in enumerate(actions) if isinstance(action, Backward | BackwardWeight))
        last_backward = max(ends, default=-1)
        forwards_end, late = self._forwards_end(actions), list[AllReduce]()
        for index, action in enumerate(actions):
            if when_forward is not None and index == forwards_end:
                when_forward()
            self._context.record.enter(first_record + index)
            if isinstance(action, Forward):
                self._seat.forward(action.microbatch)
            elif isinstance(action, Backward | BackwardInput | BackwardWeight):
                assert current is not None, "a run with backwards has gradients"
                last = index == last_backward
                gradients.expect(self._late if last else frozenset())
                self._backward(action, seeds, keep_graph=keep_graph, last=last)
                gradients.collect(current)
            elif isinstance(action, Send):
                self._seat.send(action)
            elif isinstance(action, Recv):
                self._seat.receive(action)
            elif isinstance(action, Exchange):
                self._batch.exchange(action, self._seat.outputs, self._seat.input_grads)
            elif isinstance(action, AllReduce) and reduce:
                assert current is not None, "a run with sums has gradients"
                if self._context.channels.by_hosts:
                    # Nor does a kernel of a sum wait for other ranks.
                    late.append(action)
                else:
                    gradients.sum(current, action.bucket, filled=index > last_backward)
            elif isinstance(action, ReduceScatter):
                assert current is not None, "a run with sums has gradients"
                gradients.sum(current, action.bucket, filled=not self._seat.has_rows(action.microbatch))
            elif isinstance(action, AllGather):
                self._gather(action)
        if current is not None:
            for action in late:
                gradients.sum(current, action.bucket, filled=True)
            gradients.finish(current)
        self._context.channels.finish()
        self._batch.finish()
        if self._context.code.watch is not None:
            self._context.code.watch.end_run()
        if when_forward is not None and forwards_end >= len(actions):
            when_forward()
        if current is not None and self._marks is not None:
            self._marks.finish()

    def _backward(
        self, action: Backward | BackwardInput | BackwardWeight, seeds: Seeds, *, keep_graph: bool, last: bool
    ) -> None:
        if isinstance(action, Backward):
            self._seat.backward(action.microbatch, seeds, keep_graph=keep_graph, last=last)
        elif isinstance(action, BackwardInput):
            self._seat.backward_input(action.microbatch, seeds, keep_graph=keep_graph)
        else:
            self._seat.backward_weight(action.microbatch, keep_graph=keep_graph, last=last)

    def _forwards_end(self, actions: Sequence[Action]) -> int:
        """The place behind the last forward and what it sends. Messages without a group of their own come last, and so
        do all where messages go by way of hosts, so that no device waits while a Stage computes."""
        if self._context.totals is None or self._context.channels.by_hosts:
            return len(actions)
        end = max((place for place, action in enumerate(actions, 1) if isinstance(action, Forward)), default=0)
        while end < len(actions) and isinstance(actions[end], Send | Exchange):
            end += 1
        return end

    def _gather(self, action: AllGather) -> None:
        """Where there is something to compute, its Spans gather what they need, one after another."""
        key = action.microbatch, action.direction
        if not self._seat.has_rows(action.microbatch) and key not in self._passed:
            self._passed.add(key)
            self._seat.pass_by(backward=action.direction == "backward")


def _is_forward(action: Action) -> bool:
    """True for a forward, and for what ranks without rows do of one."""
    return isinstance(action, Forward) or (isinstance(action, AllGather) and action.direction == "forward")
