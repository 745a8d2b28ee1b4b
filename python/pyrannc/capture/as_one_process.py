"""A forward sees the rows of all ranks, as one process does: it must neither count the ranks nor talk with them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pyrannc.errors import CaptureError

from .source import SourceTracker, belongs_to_user
from .torch_internals.patching import COLLECTIVES, WORLD_SIZE
from .user_names import replaced_for_users


@contextmanager
def as_one_process(tracker: SourceTracker) -> Iterator[None]:
    """While active, a forward that counts the ranks, where there are several, or talks with others is refused.

    Raises:
        CaptureError: it does.
    """
    own, real = threading.get_ident(), WORLD_SIZE[0].original

    def get_world_size(*args: Any, **kwargs: Any) -> int:
        count: int = real(*args, **kwargs)
        asks = threading.get_ident() == own and belongs_to_user(sys._getframe(1).f_code.co_filename)
        if asks and count > 1:
            raise CaptureError(
                f"{tracker.here()} asks torch.distributed for the number of ranks, {count}. The forward runs as in one "
                "process with the rows of all ranks, losses and means over rows are those of the global batch: leave "
                "out what divides or multiplies by the number of ranks"
            )
        return count

    def refusing(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own or real() == 1:
                return collective(*args, **kwargs)
            raise CaptureError(
                f"{tracker.here()} talks with other ranks (torch.distributed.{name}). The forward runs as in one "
                "process with the rows of all ranks: leave out what gathers, sums or spreads over ranks, the rows are "
                "there already"
            )

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced_for_users(real, get_world_size, *WORLD_SIZE))
        for point in COLLECTIVES:
            stack.enter_context(point.replaced_by(refusing(point.name, point.original)))
        yield
