"""Encoders and decoders together, which make one sequence of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from .family import Family, Row, draw_tokens


@dataclass(frozen=True)
class T5(Family):
    """T5 (Raffel et al., JMLR 2020), with as many layers in the encoder as in the decoder."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    head_size: int = 16
    feed_forward: int = 128
    sequence: int = 32
    vocabulary: int = 512

    def model(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=self.vocabulary,
                num_layers=self.layers,
                d_model=self.hidden,
                num_heads=self.heads,
                d_kv=self.head_size,
                d_ff=self.feed_forward,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )

    def row(self, generator: Generator) -> Row:
        return {name: draw_tokens(self.sequence, self.vocabulary, generator) for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class Whisper(Family):
    """Whisper (Radford et al., ICML 2023): sound, as ``bins`` of frequency at two frames a position, to text."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    bins: int = 16
    positions: int = 32
    sequence: int = 16
    vocabulary: int = 512

    def model(self) -> nn.Module:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        return WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=self.vocabulary,
                num_mel_bins=self.bins,
                encoder_layers=self.layers,
                decoder_layers=self.layers,
                d_model=self.hidden,
                encoder_attention_heads=self.heads,
                decoder_attention_heads=self.heads,
                encoder_ffn_dim=4 * self.hidden,
                decoder_ffn_dim=4 * self.hidden,
                max_source_positions=self.positions,
                max_target_positions=self.sequence,
                pad_token_id=0,
                bos_token_id=0,
                eos_token_id=0,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )

    def row(self, generator: Generator) -> Row:
        return {
            "input_features": torch.randn(self.bins, 2 * self.positions, generator=generator),
            "labels": draw_tokens(self.sequence, self.vocabulary, generator),
        }
