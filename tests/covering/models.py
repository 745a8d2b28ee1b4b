"""Small models of common kinds, and their batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

ROWS = 16
"""Rows of a global batch."""

WIDTH = 8
TOKENS = 5
VOCABULARY = 12


class Chain(nn.Module):
    """Linear layers, one after another."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Residual(nn.Module):
    """Layers with norms, round which their input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


class Attention(nn.Module):
    """Two heads and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mixed(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-2, -4)
        query, key, value = heads.unbind(-2)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.movedim(-3, -2).flatten(-2))
        return x + self.narrow(F.gelu(self.wide(x)))


class Language(nn.Module):
    """Logits for every token, from an embedding and attention."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(Chain):
    """A part of the forward is computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False)
        return self.layers[3](torch.tanh(self.layers[2](hidden)))  # type: ignore[no-any-return]


class Counting(Chain):
    """A buffer counts the calls, another one is an average of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        with torch.no_grad():
            self.calls += 1
            self.gain.mul_(0.5).add_(0.25)
        return hidden * self.gain


class Centred(Chain):
    """Subtracts the mean over all rows: no row is by itself."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[1](torch.tanh(self.layers[0](x)))
        return self.layers[3](torch.tanh(self.layers[2](hidden - hidden.mean(0))))  # type: ignore[no-any-return]


class Normed(Chain):
    """The direction and the length of two weights are parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        for number in (0, 2):
            parametrizations.weight_norm(self.layers[number])  # type: ignore[no-untyped-call]


class Convolved(nn.Module):
    """Convolutions with a norm over groups of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x[:, None])))
        return self.head(F.silu(self.second(hidden)).flatten(1))  # type: ignore[no-any-return]


class Inside(nn.Module):
    """A model that returns its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return criterion(self.net(x), target)


def criterion(out: Tensor, target: Tensor) -> Tensor:
    """A mean over rows: of squares, or of what tokens cost."""
    if target.is_floating_point():
        return F.mse_loss(out, target)
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def pairs(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression, float32 ``(rows, WIDTH)``."""
    made = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float32)
    return made[0], made[1]


def tokens(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens and those that follow, ``(rows, TOKENS)`` each."""
    made = torch.randint(0, VOCABULARY, (rows, TOKENS + 1), generator=generator)
    return made[:, :-1], made[:, 1:].clone()
