"""Where the GPU is inside of replays, for the watchdog: a word that kernels write and the host reads at any time."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyrannc._native import Watchdog


@dataclass(frozen=True)
class _Shared:
    """A word of the host's memory that the GPU can write, one for the life of the process.

    Attributes:
        file: the same memory as a file.
    """

    word: Tensor
    file: int


def place_word(watchdog: Watchdog | None, device: torch.device) -> Tensor:
    """One int32: the number of the place where the GPU is, 0 outside of replays.

    Args:
        watchdog: follows it; without one, and where the host cannot share memory, the word is the device's alone.
        device: whose kernels write it.
    """
    shared = None if watchdog is None else _shared(device)
    if watchdog is not None and shared is not None:
        with suppress(OSError):
            watchdog.follow(f"/proc/self/fd/{shared.file}")
            return shared.word
    return torch.zeros(1, dtype=torch.int32, device=device)


@cache
def _shared(device: torch.device) -> _Shared | None:
    try:
        file = os.memfd_create("rannc-place")
        os.ftruncate(file, mmap.PAGESIZE)
        word = torch.frombuffer(mmap.mmap(file, mmap.PAGESIZE), dtype=torch.int32, count=1)
        with torch.cuda.device(device):
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
            torch.cuda.check_error(cudart.cudaHostRegister(word.data_ptr(), mmap.PAGESIZE, 0))
    except (OSError, RuntimeError):
        # CUDA keeps an error until somebody asks: the next kernel would raise this one.
        with suppress(RuntimeError):
            torch.zeros((), device=device)
        return None
    return _Shared(word, file)


_next_number = 1


def take_numbers(places: int) -> int:
    """Numbers that no other places of this process have: the first of so many."""
    global _next_number
    first, _next_number = _next_number, _next_number + places
    return first
