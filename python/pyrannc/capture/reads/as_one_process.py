"""A forward sees the rows of all ranks, as one process does: it must neither count the ranks nor talk with them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from pyrannc.capture.torch_internals.gradients import graph_task
from pyrannc.capture.torch_internals.patching import (
    GROUP_METHODS,
    GROUP_SIZE,
    OPERATOR_CALLS,
    RANK_NOT_IN_GROUP,
    PatchPoint,
    other_sends,
    several_ranks,
)
from pyrannc.capture.user.distributed_calls import C10D, called_function
from pyrannc.capture.user.source import SourceTracker, belongs_to_user, module_of
from pyrannc.counting import told_of_counts
from pyrannc.errors import CaptureError

from .world_size import told_of_world_size

_SILENT = ("get_backend", "get_backend_config", "get_rank", "get_world_size", "_set_pg_timeout")
"""Functions that look at a group like those that talk with its ranks, and send nothing."""
_OPERATORS = frozenset(f"torch._ops.{name}" for name in ("_c10d_functional", "_c10d_functional_autograd", "c10d"))
"""Where operators stand that send."""


@contextmanager
def as_one_process(tracker: SourceTracker) -> Iterator[list[CaptureError]]:
    """While active, a forward that counts the ranks, where there are several, or talks with others is refused.

    What torch.distributed itself looks up by name at each call tells, so that the names that the model has for its
    functions do not matter. What stays whole is tried in here, and refused likewise, and so is a backward.

    Yields:
        the errors that have been raised, which some code of the user may have caught.

    Raises:
        CaptureError: it does.
    """
    if not several_ranks():
        yield []
        return
    refused: list[CaptureError] = []
    own, real_size = threading.get_ident(), GROUP_SIZE.original

    def elsewhere() -> bool:
        # Backwards on GPUs run on threads of torch.
        return threading.get_ident() != own and graph_task() < 0

    def noted(message: str) -> CaptureError:
        refused.append(CaptureError(message))
        return refused[-1]

    def refuse(count: int) -> None:
        if count > 1 and not elsewhere():
            raise noted(
                f"{tracker.here()} asks for the number of ranks, {count}. The forward runs as in one process with the "
                "rows of all ranks, losses and means over rows are those of the global batch: leave out what divides "
                "or multiplies by the number of ranks"
            )

    def size(group: Any) -> int:
        count: int = real_size(group)
        if count > 1 and belongs_to_user(_asker(sys._getframe(1))):
            refuse(count)
        return count

    def talks(what: str) -> CaptureError:
        return noted(
            f"{tracker.here()} talks with other ranks ({what}). The forward runs as in one process with the rows of "
            "all ranks, and so does its backward: leave out what gathers, sums or spreads over ranks, the rows are "
            "there already"
        )

    def refusing(point: PatchPoint) -> Callable[..., Any]:
        original = point.original

        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if elsewhere() or _is_silent(caller):
                return original(*args, **kwargs)
            raise talks(_called(caller) or f"ProcessGroup.{point.name}")

        return call

    def refusing_operators(point: PatchPoint) -> Callable[..., Any]:
        original = point.original

        def call(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
            if operator.__module__ in _OPERATORS and not elsewhere():
                raise talks(f"torch.ops.{operator}")
            return original(operator, *args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(GROUP_SIZE.replaced_by(size))
        stack.enter_context(told_of_counts(refuse))
        stack.enter_context(told_of_world_size(refuse))
        for point in OPERATOR_CALLS:
            stack.enter_context(point.replaced_by(refusing_operators(point)))
        for point in (RANK_NOT_IN_GROUP, *other_sends(), *GROUP_METHODS):
            stack.enter_context(point.replaced_by(refusing(point)))
        yield refused


def _is_silent(frame: FrameType) -> bool:
    return frame.f_code.co_name in _SILENT and module_of(frame) == C10D


def _asker(frame: FrameType) -> str:
    """The file of what asks for the number of ranks, from the innermost frame that does."""
    while frame.f_back is not None and module_of(frame) == C10D:
        frame = frame.f_back
    return frame.f_code.co_filename


def _called(frame: FrameType) -> str:
    """The function of torch.distributed that the user's line calls, from a frame inside of it."""
    line = frame
    while line.f_back is not None and not belongs_to_user(line.f_code.co_filename):
        line = line.f_back
    return called_function(frame, line)
