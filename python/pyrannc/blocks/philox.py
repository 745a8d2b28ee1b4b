"""Words of Philox4x32-10 (Salmon et al., SC 2011) for the elements of a tensor.

Word ``n`` of a stream is word ``n % 4`` of what Philox makes of the counter ``(n // 4, op, salt)`` under the call's
key. The host computes it in Rust, GPUs in Triton, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from pyrannc.blocks.stream import CallKey, Draw
from pyrannc.log import get_logger

ALWAYS = 1 << 32
"""The threshold that no word reaches."""

_WORD = ALWAYS - 1

Source: TypeAlias = "Callable[[Draw, int | None], Tensor]"
"""Gives the words of a draw, or with a threshold what :func:`keep` gives, from elsewhere."""
_source: Source | None = None


@contextmanager
def drawn_by(source: Source) -> Iterator[None]:
    """Inside, nothing is computed here: ``source`` is asked."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


def threshold_of(p: float) -> int:
    """Words below it come with probability ``p``."""
    return int(p * ALWAYS)


def words(draw: Draw, device: torch.device) -> Tensor:
    """The words, as a flat tensor of int32 in the order of the tensor's memory."""
    if _source is not None:
        return _source(draw, None)
    if draw.numel == 0:
        return torch.empty(0, dtype=torch.int32, device=device)
    if device.type == "cpu":
        return torch.frombuffer(draw.stream.words(*draw.shape), dtype=torch.int32)
    kernels = _kernels()
    if kernels is None:
        return words_by_torch(draw, device)
    made: Tensor = kernels.words(draw, device)
    return made


def keep(draw: Draw, threshold: int, device: torch.device) -> Tensor:
    """True where a word is at least ``threshold``, flat."""
    if _source is not None:
        return _source(draw, threshold)
    if draw.numel == 0:
        return torch.empty(0, dtype=torch.bool, device=device)
    if device.type == "cpu":
        return torch.frombuffer(draw.stream.keep(*draw.shape, threshold), dtype=torch.bool)
    kernels = _kernels()
    if kernels is not None and threshold < ALWAYS:
        made: Tensor = kernels.keep(draw, threshold, device)
        return made
    return unsigned(words(draw, device)) >= threshold


def masks_of(asked: Sequence[tuple[Draw, int]], device: torch.device) -> Masks | None:
    """Draws several masks in one launch, again and again; None where there is no kernel for it.

    Args:
        asked: what :func:`keep` would be asked for; nothing of it is empty, or has the threshold :data:`ALWAYS`.
    """
    kernels = _kernels() if asked else None
    if kernels is None:
        return None
    made: Masks = kernels.Masks(asked, device)
    return made


class Masks(Protocol):
    """Several masks."""

    def draw(self, key: CallKey) -> list[Tensor]:
        """What :func:`keep` would give for each under another key."""


def unsigned(made: Tensor) -> Tensor:
    """Words as non-negative int64."""
    return made.to(torch.int64) & _WORD


def words_by_torch(draw: Draw, device: torch.device) -> Tensor:
    """What :func:`words` gives, by torch's own operators."""
    lines = (draw.rows.on_device[:, None] * draw.per_row + torch.arange(draw.per_row, device=device)).flatten()
    firsts = lines * draw.outer + torch.arange(draw.outer, device=device)[:, None]
    numbers = (firsts[:, :, None] * draw.inner + torch.arange(draw.inner, device=device)).flatten()
    block = numbers >> 2
    counter = [block & _WORD, block >> 32, torch.full_like(block, draw.op), torch.full_like(block, draw.salt)]
    made = _philox(counter, draw.key.on_device & _WORD, draw.key.on_device >> 32)
    chosen = torch.stack(made, 1).gather(1, (numbers & 3)[:, None]).squeeze(1)
    return torch.where(chosen > _WORD >> 1, chosen - ALWAYS, chosen).to(torch.int32)


def _philox(counter: list[Tensor], key_lo: Tensor, key_hi: Tensor) -> list[Tensor]:
    """The ten rounds on words held in int64, whose products wrap around and keep their upper halves."""
    a, b, c, d = counter
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = ((second >> 32) & _WORD) ^ b ^ key_lo, second & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ key_hi, first & _WORD
        key_lo, key_hi = (key_lo + 0x9E3779B9) & _WORD, (key_hi + 0xBB67AE85) & _WORD
    return [a, b, c, d]


@cache
def _kernels() -> ModuleType | Any:
    """The Triton kernels; None where there is no Triton."""
    try:
        from pyrannc.blocks import philox_triton
    except ImportError as error:
        get_logger("RaNNCModule").warning(
            "Triton cannot be imported (%s): dropout and random numbers are computed by torch's operators, "
            "many times slower; install triton",
            error,
        )
        return None
    return philox_triton
