"""Models and batches that the benchmarks train, built from configurations (no weights are loaded)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

IGNORED = -100


@dataclass(frozen=True)
class Workload:
    """A model to train.

    Attributes:
        model: returns its loss, or a batch whose mean square is the loss.
        batch: the local batch of a rank: tensors by argument name, ``rows`` rows.
    """

    model: nn.Module
    batch: dict[str, Tensor]


class Chain(nn.Module):
    """RaNNC's tutorial: ``layers`` linear layers of ``hidden`` features."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain(rows: int, hidden: int, layers: int, generator: torch.Generator) -> Workload:
    return Workload(Chain(hidden, layers), {"x": torch.randn(rows, hidden, generator=generator)})


def bert(rows: int, layers: int, hidden: int, sequence: int, generator: torch.Generator) -> Workload:
    """BERT for pre-training with masked-token and next-sentence losses inside; as many masked tokens in every row."""
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(0, config.vocab_size, (rows, sequence), generator=generator)
    places = torch.rand(rows, sequence, generator=generator).topk(max(1, sequence * 15 // 100), dim=1).indices
    labels = torch.full_like(tokens, IGNORED).scatter(1, places, tokens.gather(1, places))
    batch = {
        "input_ids": tokens.scatter(1, places, config.vocab_size - 1),
        "attention_mask": torch.ones_like(tokens),
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
    }
    return Workload(BertForPreTraining(config), batch)


def make(name: str, rows: int, sizes: list[int], seed: int, rank: int) -> Workload:
    """The workload ``name`` ("chain": hidden, layers; "bert": layers, hidden, sequence) for one rank."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if name == "chain":
        hidden, layers = sizes
        return chain(rows, hidden, layers, generator)
    layers, hidden, sequence = sizes
    return bert(rows, layers, hidden, sequence, generator)


def loss_of(output: Tensor | object) -> Tensor:
    """The scalar to differentiate."""
    if isinstance(output, Tensor):
        return output.square().mean()
    loss = output.loss  # type: ignore[attr-defined]  # Hugging Face's outputs have it
    assert isinstance(loss, Tensor)
    return loss
