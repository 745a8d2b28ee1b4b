"""When captured forms are held against a capture of a later call: no guard sees all that a forward reads."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

from pyrannc.call.variant import Variant
from pyrannc.capture import Sample
from pyrannc.job import agree, process

_SHARE = 0.01
"""Of the time of all calls, at most: a capture can take as long as a hundred steps."""
_SOONER = 10
"""By how much sooner than usual it is tried again where there was no time for it."""


class Recaptures:
    """Lets one rank in turn capture a call once more, while the others wait.

    Args:
        interval: calls of one captured form from one of them to the next, at least; 0: never.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._next: WeakKeyDictionary[Variant, int] = WeakKeyDictionary()
        self._made = 0
        self._not_before_s = 0.0

    def is_due(self, variant: Variant) -> bool:
        """True at the second call of what was traced for itself, and whenever the interval has passed."""
        if not self._interval or not variant.can_compare:
            return False
        first = 1 if variant.has_own_trace else self._interval
        return variant.calls >= self._next.get(variant, first)

    def compare(self, variant: Variant, sample: Sample) -> None:
        """Captures such a call, unless too much time has gone into that lately. All ranks call it.

        Raises:
            CaptureError: on the rank whose turn it is; the model computes something else by now.
            MismatchError: on the others.
        """
        if variant.calls > 1 and not agree.broadcast_object(time.monotonic() >= self._not_before_s):
            self._next[variant] = variant.calls + max(1, self._interval // _SOONER)
            return
        start_s = time.monotonic()
        is_mine = self._made % process.get_world_size() == process.get_rank()

        def attempt() -> None:
            if is_mine and sample.rows:
                variant.compare_with(sample)

        agree.together(attempt)
        end_s = time.monotonic()
        self._not_before_s = end_s + (end_s - start_s) / _SHARE
        self._made += 1
        self._next[variant] = variant.calls + self._interval
