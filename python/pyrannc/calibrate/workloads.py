"""Single ops of several sizes that tell how fast a device is, by kind of op.

Work is counted as the core's roofline counts it: floating-point operations of products, or bytes moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Workload:
    """A forward and a backward.

    Attributes:
        work: of one kernel, by which a share of the peak is looked up.
        total: work of the whole call.
    """

    work: float
    total: float
    call: Callable[[], object]


@dataclass(frozen=True)
class Extents:
    """How large the ops are."""

    channels: int
    pixels: int
    heads: int
    sequence: int
    head_size: int
    hidden: int
    vocabulary: int


GPU = Extents(channels=256, pixels=28, heads=16, sequence=512, head_size=64, hidden=1024, vocabulary=32768)
HOST = Extents(channels=16, pixels=28, heads=2, sequence=128, head_size=64, hidden=256, vocabulary=1024)


class Workloads:
    """Ops on ``device``, each kind by increasing size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._extents = GPU if device.type == "cuda" else HOST

    def matrix(self, dtype: torch.dtype) -> Iterator[Workload]:
        """Products of matrices."""
        for size in (128, 256, 512, 1024, 2048, 4096):
            rows = 8 * size
            factors = [self._tensor(rows, size, dtype=dtype), self._tensor(size, size, dtype=dtype)]
            flops = 2.0 * rows * size**2
            yield Workload(flops, 3 * flops, _with_backward(partial(torch.matmul, *factors), factors))

    def convolution(self, dtype: torch.dtype) -> Iterator[Workload]:
        """Convolutions of images."""
        channels, pixels = self._extents.channels, self._extents.pixels
        weight = self._tensor(channels, channels, 3, 3, dtype=dtype)
        for rows in (1, 4, 16, 64):
            images = self._tensor(rows, channels, pixels, pixels, dtype=dtype)
            forward = partial(functional.conv2d, images, weight, padding=1)
            flops = 2.0 * images.numel() * channels * 9
            yield Workload(flops, 3 * flops, _with_backward(forward, [images, weight]))

    def attention(self, dtype: torch.dtype) -> Iterator[Workload]:
        """Scaled dot products; the backward computes the scores again."""
        of = self._extents
        for rows in (1, 4, 16, 64):
            query, key, value = (self._tensor(rows, of.heads, of.sequence, of.head_size, dtype=dtype) for _ in range(3))
            forward = partial(functional.scaled_dot_product_attention, query, key, value)
            flops = 4.0 * rows * of.heads * of.sequence**2 * of.head_size
            yield Workload(1.75 * flops, 3.5 * flops, _with_backward(forward, [query, key, value]))

    def pointwise(self) -> Iterator[Workload]:
        """A function of single elements: two tensors move forward, three backward."""
        for rows in (64, 512, 4096, 32768, 262144):
            x = self._tensor(rows, self._extents.hidden)
            forward = partial(functional.gelu, x)
            yield Workload(10.0 * x.numel(), 20.0 * x.numel(), _with_backward(forward, [x]))

    def normalisation(self) -> Iterator[Workload]:
        """Normalisations of rows."""
        hidden = self._extents.hidden
        weight, bias = self._tensor(hidden), self._tensor(hidden)
        for rows in (64, 512, 4096, 32768, 262144):
            x = self._tensor(rows, hidden)
            forward = partial(functional.layer_norm, x, (hidden,), weight, bias)
            yield Workload(14.0 * x.numel(), 28.0 * x.numel(), _with_backward(forward, [x, weight, bias]))

    def embedding(self) -> Iterator[Workload]:
        """Rows of a table; the gradient is of the whole table."""
        table = self._tensor(self._extents.vocabulary, self._extents.hidden)
        for rows in (64, 1024, 16384, 131072):
            tokens = torch.randint(self._extents.vocabulary, (rows,), device=self._device)
            moved = 4.0 * (4 * rows * self._extents.hidden + table.numel())
            forward = partial(functional.embedding, tokens, table)
            yield Workload(moved / 2, moved, _with_backward(forward, [table]))

    def optimizer(self) -> Iterator[Workload]:
        """Steps of Adam: seven tensors of the size of the parameters move."""
        for count in (1, 16, 256):
            params = [
                torch.nn.Parameter(self._tensor(self._extents.hidden, self._extents.hidden)) for _ in range(count)
            ]
            for param in params:
                param.grad = torch.ones_like(param)
            moved = 7.0 * 4 * sum(param.numel() for param in params)
            yield Workload(moved, moved, torch.optim.AdamW(params).step)

    def tiny(self) -> tuple[Callable[[], object], int]:
        """A call of many ops that compute next to nothing, and how many they are."""
        x = self._tensor(1)

        def forward() -> Tensor:
            y = x
            for _ in range(_TINY_OPS):
                y = torch.tanh(y)
            return y

        return _with_backward(forward, [x]), 2 * _TINY_OPS

    def _tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device).requires_grad_()


_TINY_OPS = 50


def _with_backward(forward: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], object]:
    grad = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, grad)
