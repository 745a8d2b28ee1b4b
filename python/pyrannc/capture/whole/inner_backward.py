"""A forward that differentiates inside: what a trace makes of it may need tensors that the trace does not know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any

from torch import fx

from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.torch_internals.patching import DERIVATIVES, RUN_BACKWARD
from pyrannc.capture.torch_internals.tracing import current_tracer
from pyrannc.capture.user.source import Place, SourceTracker, belongs_to_user

_CALLED_AT = "rannc_backward_called_at"
"""In the ``meta`` of nodes that a backward in the forward has made: file and line of its call."""


@contextmanager
def inner_backwards_noted() -> Iterator[None]:
    """While active, nodes of a trace tell what backward has made them."""
    run = RUN_BACKWARD.original

    def run_noted(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return run(*args, **kwargs)
        last = next(iter(reversed(tracer.graph.nodes)), None)
        try:
            return run(*args, **kwargs)
        finally:
            called_at = _line_of_the_user(sys._getframe(1))
            for node in takewhile(lambda node: node is not last, reversed(tracer.graph.nodes)):
                node.meta[_CALLED_AT] = called_at

    with RUN_BACKWARD.replaced_by(run_noted):
        yield


@contextmanager
def transforms_refused(tracker: SourceTracker) -> Iterator[None]:
    """While active, a trace does not enter ``torch.func.grad`` and the like, which hide from it what they compute.

    Raises:
        UntraceableError: it is about to.
    """

    def enter(original: Any) -> Any:
        if current_tracer() is not None:
            place = tracker.here()
            raise differentiates_inside(place, f"{place.file}:{place.line}")
        return original()

    with ExitStack() as stack:
        for point in DERIVATIVES:
            stack.enter_context(point.replaced_by(partial(enter, point.original)))
        yield


def differentiates_inside(place: Place, called_at: str) -> UntraceableError:
    """The error of a forward that differentiates inside, in a call at this line."""
    cause = f"it differentiates inside of the forward (at {called_at}), which cannot be captured here"
    advice = "compute this derivative with operators in the forward, or keep what takes it in one piece"
    return UntraceableError(f"{place}: {cause}; {advice}", place, cause)


def backward_called_at(node: fx.Node) -> str | None:
    """File and line of the call of the backward that made a node, or that made something of it; None without one."""
    found = (each.meta.get(_CALLED_AT) for each in (node, *node.users))
    return next((place for place in found if place is not None), None)


def _line_of_the_user(frame: FrameType | None) -> str:
    while frame is not None:
        if belongs_to_user(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a line that is not known"
