"""Runs one rank's Actions, one after another."""

from __future__ import annotations

from collections.abc import Sequence

from pyrannc.core.program import Action, Backward, Forward, RankProgram, Recv, Send
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.seat import Seat, Seeds
from pyrannc.runtime.timing import StepMarks
from pyrannc.store.gradient_set import GradientSet


class Executor:
    """The Actions of one step.

    Args:
        context: the rank's Stage.
        program: the rank's Actions.
        seat: computes and communicates.
        marks: where to note when gradients have been summed.
    """

    def __init__(self, context: StageContext, program: RankProgram, seat: Seat, marks: StepMarks | None) -> None:
        self._context = context
        self._seat = seat
        self._marks = marks
        self._last_backward = _last_backward(program)

    def run(
        self,
        actions: Sequence[Action],
        current: GradientSet | None,
        seeds: Seeds,
        *,
        first_record: int = 0,
        keep_graph: bool = False,
        reduce: bool = True,
    ) -> None:
        """Runs Actions in order.

        Args:
            current: where gradients go; ``None`` for a run without backwards.
            seeds: the gradient of an output of a microbatch, by microbatch and Value.
            first_record: place of the first Action in the record.
            keep_graph: backwards leave the autograd graph alive.
            reduce: sum gradients over ranks.
        """
        gradients = self._context.gradients
        for index, action in enumerate(actions, first_record):
            self._context.record.enter(index)
            if isinstance(action, Forward):
                self._seat.forward(action.microbatch)
            elif isinstance(action, Backward):
                assert current is not None, "a run with backwards has gradients"
                gradients.expect(last=reduce and action.microbatch == self._last_backward)
                self._seat.backward(action.microbatch, seeds, keep_graph=keep_graph)
                gradients.collect(current)
            elif isinstance(action, Send):
                self._seat.send(action)
            elif isinstance(action, Recv):
                self._seat.receive(action)
            elif current is not None:
                if reduce:
                    gradients.reduce(current)
                else:
                    gradients.settle(current)
        self._context.channels.finish()
        if current is not None and self._marks is not None:
            self._marks.finish()


def _last_backward(program: RankProgram) -> int | None:
    backwards = [action.microbatch for action in (*program.forward, *program.backward) if isinstance(action, Backward)]
    return backwards[-1] if backwards else None
