"""The time of a GPU and where it is, written by a kernel: an event says only when it was recorded last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["rows", "step", "place", "number"])
def _mark_kernel(times_ptr, row_ptr, word_ptr, rows, width, step, place, number):
    row = (tl.load(row_ptr) + step) % rows
    tl.store(row_ptr, row)
    tl.store(times_ptr + row * width + place, globaltimer())
    # Written through to the host's memory: it is read while kernels behind this one run.
    tl.store(word_ptr, number, cache_modifier=".wt")


def mark(times: Tensor, row: Tensor, step: int, place: int, word: Tensor, number: int) -> None:
    """Writes the time in nanoseconds, and a number.

    Args:
        times: ``[rows, places]``, int64, contiguous.
        row: into which row: one int64 on the device.
        step: rows to go on by before; the first one follows the last.
        word: for the number: one int32 on the device, or on the host where that is registered memory.
    """
    with torch.cuda.device(times.device):
        _mark_kernel[(1,)](times, row, word, times.size(0), times.size(1), step, place, number)
