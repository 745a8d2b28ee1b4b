"""Models to profile, and how to get at their Blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyrannc._native import Blocks, Graph
from pyrannc.capture import capture
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts
from pyrannc.profile.block import BlockCode, BlockSource
from pyrannc.profile.profiler import Runs, Subject

WIDTH = 64
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Equal layers between two of their own kind."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class Skips(nn.Module):
    """Results in place, views, and a value that passes over the middle; one operator that no table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.last = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        skipped = torch.relu_(self.down(x))
        x = torch.special.erfcx(self.middle(skipped).view(-1, 2, WIDTH // 2)).view(-1, WIDTH)
        x = torch.relu_(self.up(torch.cat([x, skipped], 1)))
        return self.last(x)  # type: ignore[no-any-return]


class Positions(nn.Module):
    """Tokens and positions are looked up; positions and mask depend on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(8))
        scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e9)
        return nn.functional.cross_entropy(self.head(scores.softmax(-1) @ x).flatten(0, 1), tokens.flatten())


class Cholesky(nn.Module):
    """Its middle fails on anything but positive definite matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        product = x @ x.transpose(1, 2) * self.scale + torch.eye(x.shape[-1])
        return torch.linalg.cholesky(product).tanh()


class Transposed(nn.Module):
    """What comes out of its middle is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).transpose(1, 2))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A branch around two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        second = self.layers[2](torch.tanh(self.layers[1](first)))
        return self.layers[3](torch.tanh(first + second))  # type: ignore[no-any-return]


class Mapped(nn.Module):
    """Rows that run through ``torch.vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.vmap(lambda row: torch.tanh(row) / (1 + row.abs().sum()))(self.first(x)))  # type: ignore[no-any-return]


class Masked(nn.Module):
    """A mask as large as the batch that depends on no input; one layer fills it with a learned bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1).expand(x.shape[0], 8, 8)
        x = torch.where(mask, 1.0, 2.0) @ torch.tanh(self.first(x))
        bias = self.bias.expand(x.shape[0], 8, 8).masked_fill(mask, -1.0)
        return self.last(bias @ torch.tanh(x))  # type: ignore[no-any-return]


def subject(model: nn.Module, samples: Sequence[Tensor], row_counts: tuple[int, ...]) -> Subject:
    """A model's Blocks, as planning gives them to the profiler."""
    captured = capture(model, samples, {}, device=CPU, rows=samples[0].shape[0])
    graph = Graph.from_json(captured.graph_json)
    facts = GraphFacts.from_json(captured.graph_json, graph.row_dims())

    def runs(blocks: Blocks) -> Runs:
        parts = Parts.from_json(blocks.partition_json())
        given = samples, frozenset(facts.outputs), True
        return Runs(blocks, parts, BlockSource(captured, facts, parts.crossings, *given))

    return Subject(
        graph_hash=graph.hash(),
        blocks=runs(graph.blocks()),
        spans=runs(graph.spans()),
        row_counts=row_counts,
        hosts=("here",),
        level_names=("loopback",),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def block(subject: Subject, place: int) -> BlockCode:
    """One of them, ready to run."""
    return subject.blocks.code(place, CPU)
