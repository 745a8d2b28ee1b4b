"""ELECTRA: two networks with common embeddings, trained together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from .family import IGNORED, Family, Row, draw_tokens, mask_tokens

_GENERATOR_SHARE = 4
"""The generator is so many times narrower."""
_DISCRIMINATOR_WEIGHT = 50.0


@dataclass(frozen=True)
class Electra(Family):
    """ELECTRA (Clark et al., ICLR 2020): a generator replaces tokens, a discriminator finds those that it replaced."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    embedding: int = 32
    sequence: int = 32
    vocabulary: int = 512

    def model(self) -> nn.Module:
        from transformers import ElectraForMaskedLM, ElectraForPreTraining

        generator = ElectraForMaskedLM(self._config(_GENERATOR_SHARE))
        return _TwoNetworks(generator, ElectraForPreTraining(self._config(1)))

    def row(self, generator: Generator) -> Row:
        return mask_tokens(draw_tokens(self.sequence, self.vocabulary, generator), generator)

    def _config(self, share: int) -> Any:
        from transformers import ElectraConfig

        return ElectraConfig(
            vocab_size=self.vocabulary,
            embedding_size=self.embedding,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden // share,
            num_attention_heads=self.heads // share,
            intermediate_size=4 * self.hidden // share,
            max_position_embeddings=self.sequence,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            summary_last_dropout=0.0,
        )


class _TwoNetworks(nn.Module):
    def __init__(self, generator: Any, discriminator: Any) -> None:
        super().__init__()
        for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
            setattr(generator.electra.embeddings, name, getattr(discriminator.electra.embeddings, name))
        generator.tie_weights()
        self.generator = generator
        self.discriminator = discriminator

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        guessed = self.generator(input_ids=input_ids, labels=labels)
        hidden = labels != IGNORED
        original = torch.where(hidden, labels, input_ids)
        # The largest of logits and Gumbel noise is a token drawn by their probabilities.
        noise = -torch.empty_like(guessed.logits).exponential_().log()
        drawn = torch.where(hidden, (guessed.logits.detach() + noise).argmax(-1), input_ids)
        found = self.discriminator(input_ids=drawn, labels=(drawn != original).long())
        return {"loss": guessed.loss + _DISCRIMINATOR_WEIGHT * found.loss}
