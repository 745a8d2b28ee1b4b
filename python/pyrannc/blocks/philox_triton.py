"""Triton kernels: words of Philox4x32-10, and masks made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyrannc.blocks.stream import CallKey, Draw

_MOST, _LEAST = 2048, 512
_WIDE = 16
# Which of the arguments do not shape the code: no variant is compiled for their values.
_PLAIN = ["op", "salt", "outer", "lines", "per_row", "chunks", "threshold"]


@triton.jit
def _words_of(key_ptr, op, salt, block, TILE: tl.constexpr):
    """The words of a stream's blocks of four, one after another."""
    none = tl.zeros([TILE // 4], tl.uint32)
    third, fourth = none + op.to(tl.uint32), none + salt.to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(key_ptr), block.to(tl.uint32), (block >> 32).to(tl.uint32), third, fourth)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _tile(key_ptr, rows_ptr, op, salt, outer, lines, per_row, inner, chunks, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """Words of a part of one line, where they lie in memory, and which of them do."""
    line = tl.program_id(0) // chunks
    start = (tl.program_id(0) % chunks).to(tl.int64) * TILE
    within = line % lines
    in_batch = tl.load(rows_ptr + within // per_row) * per_row + within % per_row
    first = (in_batch * outer + line // lines) * inner
    words = _words_of(key_ptr, op, salt, (first + start) // 4 + tl.arange(0, TILE // 4), TILE)
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


@triton.jit
def _masks_kernel(out_ptr, key_ptr, of_program_ptr, stretches_ptr, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    stretch = stretches_ptr + tl.load(of_program_ptr + tl.program_id(0)) * 7
    op, salt = tl.load(stretch), tl.load(stretch + 1)
    threshold, first, count = tl.load(stretch + 2), tl.load(stretch + 3), tl.load(stretch + 4)
    start = (tl.program_id(0) - tl.load(stretch + 5)) * TILE
    base = tl.load(stretch + 6) + start
    words = _words_of(key_ptr, op, salt, (first + start) // 4 + tl.arange(0, TILE // 4), TILE)
    place = tl.arange(0, TILE)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    else:
        place -= (first % 4).to(tl.int32)
    inside = (place + start >= 0) & (place + start < count)
    tl.store(out_ptr + base + place, (words >= threshold.to(tl.uint32)).to(tl.int8), mask=inside)


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


class Masks:
    """Several masks, drawn in one launch.

    What a mask takes of a stream is a few stretches of words that follow one another. Each program draws a part of one
    stretch, whose place and stream it reads from a table on the device.

    Args:
        asked: what is drawn, and the threshold below 2^32; nothing of it is empty.
    """

    def __init__(self, asked: Sequence[tuple[Draw, int]], device: torch.device) -> None:
        sizes = [draw.numel for draw, _ in asked]
        # Each mask begins where wide stores may.
        ends = list(accumulate(triton.cdiv(size, _WIDE) * _WIDE for size in sizes))
        self._places = [(end - triton.cdiv(size, _WIDE) * _WIDE, size) for end, size in zip(ends, sizes, strict=True)]
        self._bytes = ends[-1]
        self._device = device
        parts = [
            _stretches(draw, threshold, at) for (draw, threshold), (at, _) in zip(asked, self._places, strict=True)
        ]
        table = torch.cat(parts)
        first, count, at = table[:, 3], table[:, 4], table[:, 6]
        self._aligned = bool(((first % 4 == 0) & (at % _WIDE == 0)).all())
        self._tile = min(_MOST, max(_LEAST, triton.next_power_of_2(int(count.max()))))
        programs = (count + (0 if self._aligned else 3) + self._tile - 1) // self._tile
        table[:, 5] = programs.cumsum(0) - programs
        self._grid = (int(programs.sum()), 1, 1)
        of_program = torch.arange(len(table), dtype=torch.int32, device="cpu").repeat_interleave(programs)
        self._of_program, self._stretches = of_program.to(device), table.to(device)
        self._run: Callable[..., None] | None = None

    def draw(self, key: CallKey) -> list[Tensor]:
        """The masks under a key, flat."""
        out = torch.empty(self._bytes, dtype=torch.int8, device=self._device)
        arguments = (out, key.on_device, self._of_program, self._stretches)
        if self._run is None:
            compiled = _masks_kernel[self._grid](*arguments, TILE=self._tile, ALIGNED=self._aligned)
            # Triton's interpreter compiles nothing.
            self._run = None if compiled is None else compiled[self._grid]
        else:
            self._run(*arguments, self._tile, self._aligned)
        masks = out.view(torch.bool)
        return [masks[at : at + size] for at, size in self._places]


def _stretches(draw: Draw, threshold: int, at: int) -> Tensor:
    """A line for each: op, salt, threshold, first word, number of words, first program, place in memory."""
    runs = torch.tensor([(lo, hi - lo) for lo, hi in draw.rows.runs if hi > lo], device="cpu") * draw.per_row
    if draw.outer > 1:
        lines = torch.cat([torch.arange(lo, lo + count, device="cpu") for lo, count in runs.tolist()])
        runs = torch.stack([lines, torch.ones_like(lines)], 1)
    outer = torch.arange(draw.outer, device="cpu")[:, None]
    first = ((runs[:, 0] * draw.outer + outer) * draw.inner).flatten()
    count = (runs[:, 1] * draw.inner).expand(draw.outer, -1).flatten()
    stretch = torch.tensor([draw.op, draw.salt, threshold, 0, 0, 0, 0], device="cpu").repeat(len(first), 1)
    stretch[:, 3], stretch[:, 4], stretch[:, 6] = first, count, count.cumsum(0) - count + at
    return stretch


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
