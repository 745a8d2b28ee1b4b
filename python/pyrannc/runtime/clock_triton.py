"""The time of a GPU and where it is, written by a kernel: an event says only when it was recorded last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["place", "number"])
def _mark_kernel(times_ptr, row_ptr, word_ptr, width, place, number):
    tl.store(times_ptr + tl.load(row_ptr) * width + place, globaltimer())
    # Written through to the host's memory: it is read while kernels behind this one run.
    tl.store(word_ptr, number, cache_modifier=".wt")


def mark(times: Tensor, row: Tensor, place: int, word: Tensor, number: int) -> None:
    """Writes the time in nanoseconds, and a number.

    Args:
        times: ``[rows, places]``, int64, contiguous.
        row: into which row: one int64 on the device.
        word: for the number: one int32 on the device, or on the host where that is registered memory.
    """
    with torch.cuda.device(times.device):
        _mark_kernel[(1,)](times, row, word, times.size(1), place, number)
