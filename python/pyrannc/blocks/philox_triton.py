"""Triton kernels: words of Philox4x32-10, and dropout in one pass, without a mask in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrannc.blocks.stream import Draw

_MOST, _LEAST = 2048, 512
# Which of the arguments do not shape the code: no variant is compiled for their values.
_PLAIN = ["op", "salt", "outer", "lines", "per_row", "chunks", "threshold"]


@triton.jit
def _tile(key_ptr, rows_ptr, op, salt, outer, lines, per_row, inner, chunks, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Words of a part of one line, where they lie in memory, and which of them do."""
    line = tl.program_id(0) // chunks
    start = (tl.program_id(0) % chunks).to(tl.int64) * TILE
    within = line % lines
    in_batch = tl.load(rows_ptr + within // per_row) * per_row + within % per_row
    first = (in_batch * outer + line // lines) * inner
    block = (first + start) // 4 + tl.arange(0, TILE // 4)
    none = tl.zeros([TILE // 4], tl.uint32)
    third, fourth = none + op.to(tl.uint32), none + salt.to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(key_ptr), block.to(tl.uint32), (block >> 32).to(tl.uint32), third, fourth)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    place = tl.arange(0, TILE)
    if not ALIGNED:
        place -= (first % 4).to(tl.int32)
    inside = (place + start >= 0) & (place + start < inner)
    return words, line.to(tl.int64) * inner + start, place, inside


@triton.jit(do_not_specialize=_PLAIN)
def _words_kernel(
    out_ptr,
    threshold,
    key_ptr,
    rows_ptr,
    op,
    salt,
    outer,
    lines,
    per_row,
    inner,
    chunks,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    words, base, place, inside = _tile(key_ptr, rows_ptr, op, salt, outer, lines, per_row, inner, chunks, TILE, ALIGNED)
    if out_ptr.dtype.element_ty == tl.int32:
        tl.store(out_ptr + base + place, words.to(tl.int32, bitcast=True), mask=inside)
    else:
        tl.store(out_ptr + base + place, (words >= threshold.to(tl.uint32)).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=_PLAIN)
def _dropped_kernel(
    x_ptr,
    out_ptr,
    scale,
    threshold,
    key_ptr,
    rows_ptr,
    op,
    salt,
    outer,
    lines,
    per_row,
    inner,
    chunks,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    words, base, place, inside = _tile(key_ptr, rows_ptr, op, salt, outer, lines, per_row, inner, chunks, TILE, ALIGNED)
    x = tl.load(x_ptr + base + place, mask=inside)
    kept = words >= threshold.to(tl.uint32)
    if x.dtype == tl.float64:  # noqa: SIM108  # known when it is compiled
        made = x * kept.to(tl.float64)
    else:
        made = x.to(tl.float32) * tl.where(kept, scale, 0.0)
    tl.store(out_ptr + base + place, made.to(x.dtype), mask=inside)


def words(draw: Draw, device: torch.device) -> Tensor:
    """One int32 for each element, flat."""
    out = torch.empty(draw.numel, dtype=torch.int32, device=device)
    _launch(_words_kernel, (out,), (0,), draw)
    return out


def keep(draw: Draw, threshold: int, device: torch.device) -> Tensor:
    """True where a word is at least ``threshold``, which is below 2^32; flat."""
    out = torch.empty(draw.numel, dtype=torch.int8, device=device)
    _launch(_words_kernel, (out,), (threshold,), draw)
    return out.view(torch.bool)


def dropped(x: Tensor, draw: Draw, threshold: int, scale: float) -> Tensor:
    """``x * scale`` where a word is at least ``threshold``, else ``x * 0``; ``x`` is contiguous and not empty."""
    out = torch.empty_like(x)
    _launch(_dropped_kernel, (x, out), (scale, threshold), draw)
    # Triton takes numbers in single precision.
    return out.mul_(scale) if x.dtype == torch.float64 else out


# Finding the compiled kernel for its arguments takes Triton longer than torch takes for a whole operator, so what it
# found is kept: by all that shapes the code.
_found: dict[tuple[object, ...], tuple[Callable[..., None], int, int, bool]] = {}
_MOST_FOUND = 4096


def _launch(kernel: Any, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], draw: Draw) -> None:
    shape = (draw.outer, draw.rows.count * draw.per_row, draw.per_row, draw.inner)
    like = tensors[-1]
    unaligned = any(tensor.data_ptr() & 15 for tensor in tensors)
    # Triton passes a number in 32 bits where it fits.
    wide = draw.salt >> 31 != 0, numbers[-1] >= 1 << 31
    key = (kernel, shape, like.dtype, like.device, unaligned, wide)
    arguments = (*tensors, *numbers, draw.key.on_device, draw.rows.on_device, draw.op, draw.salt, *shape)
    found = _found.get(key)
    if found is not None:
        run, chunks, tile, aligned = found
        run(*arguments, chunks, tile, aligned)
        return
    grid, chunks, tile, aligned = _parts(*shape)
    compiled = kernel[grid](*arguments, chunks, TILE=tile, ALIGNED=aligned)
    # Triton's interpreter compiles nothing.
    if compiled is not None:
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[key] = compiled[grid], chunks, tile, aligned


def _parts(outer: int, lines: int, per_row: int, inner: int) -> tuple[tuple[int, int, int], int, int, bool]:
    """Programs, parts of a line, the size of a part: of one line, so that no program divides for each element."""
    aligned = inner % 4 == 0
    tile = min(_MOST, max(_LEAST, triton.next_power_of_2(inner)))
    # Where lines begin within a block of four words, that block's words before them take a place too.
    chunks = triton.cdiv(inner + (0 if aligned else 3), tile)
    return (outer * lines * chunks, 1, 1), chunks, tile, aligned
