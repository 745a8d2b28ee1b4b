"""Peaks of memory: those of steps, which the ledger tells, without what came before, and of parts of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyrannc.job.device_memory import give_back


def begin_peaks(device: torch.device) -> None:
    """Gives back what nothing uses, and forgets the peaks until now."""
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Growth:
    """How much more of a GPU's memory than before some work has, which may come in parts.

    What others take between the parts counts for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held_bytes = 0
        self._most_bytes = 0
        self._is_known = True

    @property
    def most_bytes(self) -> int:
        """The most at a time; 0 where peaks that are older hide it."""
        return self._most_bytes if self._is_known else 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, the work or a part of it is done."""
        allocated, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        yield
        risen = torch.cuda.max_memory_allocated(self._device)
        self._is_known &= risen > peak or risen == allocated
        self._most_bytes = max(self._most_bytes, self._held_bytes + risen - allocated)
        self._held_bytes += torch.cuda.memory_allocated(self._device) - allocated
