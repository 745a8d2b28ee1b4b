"""Peaks of memory that the ledger tells: those of steps, without what came before."""

from __future__ import annotations

import torch

from pyrannc.job.device_memory import give_back


def begin_peaks(device: torch.device) -> None:
    """Gives back what nothing uses, and forgets the peaks until now."""
    give_back(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
