"""Models and batches that the benchmarks train, built from configurations (no weights are loaded)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

IGNORED = -100


class Chain(nn.Module):
    """RaNNC's tutorial: ``layers`` linear layers of ``hidden`` features."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_model(name: str, sizes: list[int], seed: int) -> nn.Module:
    """The model ``name`` ("chain": hidden, layers; "bert": layers, hidden, sequence)."""
    torch.manual_seed(seed)
    if name == "chain":
        hidden, layers = sizes
        return Chain(hidden, layers)
    layers, hidden, sequence = sizes
    return BertForPreTraining(_bert_config(layers, hidden, sequence))


def make_batch(name: str, rows: int, sizes: list[int], seed: int, rank: int) -> dict[str, Tensor]:
    """A rank's batch of ``rows`` rows: tensors by argument name. Every row of a BERT has as many masked tokens."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if name == "chain":
        return {"x": torch.randn(rows, sizes[0], generator=generator)}
    layers, hidden, sequence = sizes
    vocabulary = _bert_config(layers, hidden, sequence).vocab_size
    tokens = torch.randint(0, vocabulary, (rows, sequence), generator=generator)
    places = torch.rand(rows, sequence, generator=generator).topk(max(1, sequence * 15 // 100), dim=1).indices
    return {
        "input_ids": tokens.scatter(1, places, vocabulary - 1),
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.full_like(tokens, IGNORED).scatter(1, places, tokens.gather(1, places)),
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
    }


def _bert_config(layers: int, hidden: int, sequence: int) -> BertConfig:
    return BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=sequence,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def loss_of(output: Tensor | object) -> Tensor:
    """The scalar to differentiate."""
    if isinstance(output, Tensor):
        return output.square().mean()
    loss = output.loss  # type: ignore[attr-defined]  # Hugging Face's outputs have it
    assert isinstance(loss, Tensor)
    return loss
