"""From random words to numbers of a law. One text for all devices: uniform numbers and masks agree to the bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyrannc.blocks.philox import unsigned, words
from pyrannc.blocks.stream import Draw
from pyrannc.capture.torch_internals.operators import assert_on_device

# Bits that numbers of a type tell apart below one.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_TWO_WORDS = 1 << 31


def uniform(draw: Draw, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In [0, 1)."""
    digits = _DIGITS.get(dtype, 24)
    made = _bits(draw, digits, device).to(dtype if dtype in _DIGITS else torch.float32).mul_(2.0**-digits)
    return made.to(dtype).view(shape)


def standard_normal(draw: Draw, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """By Box and Muller (1958): one number of two uniform ones."""
    work = _work(dtype)
    radius, angle = _between(draw.times(2), work, device).view(-1, 2).t().contiguous().unbind()
    made = radius.log_().mul_(-2).sqrt_().mul_(angle.mul_(2 * math.pi).cos_())
    return made.view(shape).to(dtype)


def standard_exponential(draw: Draw, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Above 0: its logarithm is finite."""
    return _between(draw, _work(dtype), device).log_().neg_().view(shape).to(dtype)


def bernoulli(draw: Draw, p: Tensor) -> Tensor:
    """True with probability ``p``, element by element.

    Raises:
        RuntimeError: an element of ``p`` is none; on GPUs it is told later, as by torch itself.
    """
    assert_on_device(((p >= 0) & (p <= 1)).all(), "bernoulli expects probabilities between 0 and 1")
    return unsigned(words(draw, p.device)).view(p.shape) < p.double().mul(2.0**32)


def integers(draw: Draw, shape: torch.Size, low: int, high: int, device: torch.device) -> Tensor:
    """In [low, high), as int64."""
    count = high - low
    if count <= _TWO_WORDS:
        scaled = (unsigned(words(draw, device)) * count) >> 32
    else:
        scaled = (words(draw.times(2), device).view(torch.int64) & ((1 << 63) - 1)) % count
    return scaled.add_(low).view(shape)


def _work(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _between(draw: Draw, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uniform in (0, 1), both ends left out: a bit less, in the middle of each interval."""
    digits = _DIGITS[dtype] - 1
    return _bits(draw, digits, device).to(dtype).add_(0.5).mul_(2.0**-digits)


def _bits(draw: Draw, digits: int, device: torch.device) -> Tensor:
    """The upper ``digits`` bits of one word for each element, of two where one has not as many."""
    mask = (1 << digits) - 1
    if digits > 32:
        return (words(draw.times(2), device).view(torch.int64) >> (64 - digits)) & mask
    return (words(draw, device) >> (32 - digits)) & mask
