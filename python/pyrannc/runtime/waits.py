"""Whether code waits for a GPU: its host reads what has been computed, which no graph can hold, and may act by it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WAITS = "synchronizing CUDA operation"
_OF_WATCHING = "Synchronization debug mode"


@contextmanager
def waits_noted(device: torch.device) -> Iterator[list[str]]:
    """At its end the list has the places that have waited inside; other warnings come then."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
            told = [warning for warning in seen if _OF_WATCHING not in str(warning.message)]
            waits = [warning for warning in told if _WAITS in str(warning.message)]
            found += [f"{warning.filename}:{warning.lineno}" for warning in waits]
    others = {(str(w.message), w.filename, w.lineno): w for w in told if w not in waits}
    for warning in others.values():
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
