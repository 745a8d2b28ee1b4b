"""Forwards that take some numbers of rows only, as ``x.view(-1, 2, width)`` takes even ones.

A rank's own rows, or as many as no other extent has, need not be among these, though those of the whole batch are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyrannc.capture.nodes.row_conditions import first_other
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.reads.assumptions import Answering
from pyrannc.capture.trace.tracer import Trace


def trace_for_batch(tracing: Callable[[Answering], Trace], answers: Answering, rows: int) -> Trace:
    """The trace of a call; with a multiple of the batch's rows where it fails with others, or goes another way.

    Args:
        tracing: gives the trace for answers.
        answers: to the model's questions.
        rows: of the whole batch.

    Raises:
        UntraceableError: it fails with these, too.
    """
    by_multiples = replace(answers, multiple_of=max(rows, 2))
    try:
        traced = tracing(answers)
    except UntraceableError as error:
        if not error.rows % by_multiples.multiple_of:
            raise
        try:
            return tracing(by_multiples)
        except UntraceableError:
            if error.needs_rows:
                # What it says holds for any number of rows.
                raise error from None
            raise
    if answers.part_of_batch or first_other(traced.row_conditions, rows) is None:
        return traced
    return tracing(by_multiples)
