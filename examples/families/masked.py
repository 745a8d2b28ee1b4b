"""Encoders of text, which predict hidden tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from .family import Family, Row, draw_tokens, mask_tokens


@dataclass(frozen=True)
class _Encoder(Family):
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    sequence: int = 32
    vocabulary: int = 512

    def row(self, generator: Generator) -> Row:
        return mask_tokens(draw_tokens(self.sequence, self.vocabulary, generator), generator)


@dataclass(frozen=True)
class Bert(_Encoder):
    """BERT (Devlin et al., NAACL 2019): hidden tokens and next sentence."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForPreTraining

        return BertForPreTraining(
            BertConfig(
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                intermediate_size=4 * self.hidden,
                max_position_embeddings=self.sequence,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )

    def row(self, generator: Generator) -> Row:
        follows = torch.randint(2, (), generator=generator)
        return {**super().row(generator), "next_sentence_label": follows}


@dataclass(frozen=True)
class Albert(_Encoder):
    """ALBERT (Lan et al., ICLR 2020): all layers share their weights; hidden tokens and the order of sentences."""

    embedding: int = 32

    def model(self) -> nn.Module:
        from transformers import AlbertConfig, AlbertForPreTraining

        return AlbertForPreTraining(
            AlbertConfig(
                vocab_size=self.vocabulary,
                embedding_size=self.embedding,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                intermediate_size=4 * self.hidden,
                max_position_embeddings=self.sequence,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                classifier_dropout_prob=0.0,
            )
        )

    def row(self, generator: Generator) -> Row:
        swapped = torch.randint(2, (), generator=generator)
        return {**super().row(generator), "sentence_order_label": swapped}


@dataclass(frozen=True)
class Deberta(_Encoder):
    """DeBERTa v2 (He et al., ICLR 2021): attention to contents and, apart from them, to relative positions."""

    def model(self) -> nn.Module:
        from transformers import DebertaV2Config, DebertaV2ForMaskedLM

        return DebertaV2ForMaskedLM(
            DebertaV2Config(
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                intermediate_size=4 * self.hidden,
                max_position_embeddings=self.sequence,
                relative_attention=True,
                position_buckets=self.sequence // 2,
                pos_att_type=["p2c", "c2p"],
                share_att_key=True,
                norm_rel_ebd="layer_norm",
                position_biased_input=False,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
