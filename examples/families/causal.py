"""Decoders of text, which predict the next token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from .family import Family, Row, draw_tokens


@dataclass(frozen=True)
class _Decoder(Family):
    layers: int = 2
    hidden: int = 64
    sequence: int = 32
    vocabulary: int = 512

    def row(self, generator: Generator) -> Row:
        tokens = draw_tokens(self.sequence, self.vocabulary, generator)
        return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True)
class Gpt2(_Decoder):
    """GPT-2 (Radford et al., 2019)."""

    heads: int = 4

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.vocabulary,
                n_layer=self.layers,
                n_embd=self.hidden,
                n_head=self.heads,
                n_positions=self.sequence,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
            )
        )


@dataclass(frozen=True)
class Llama(_Decoder):
    """Llama 3 (Grattafiori et al., 2024): several heads of queries share one of keys and values."""

    heads: int = 4
    key_heads: int = 2
    feed_forward: int = 128

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_heads,
                intermediate_size=self.feed_forward,
                max_position_embeddings=self.sequence,
                use_cache=False,
            )
        )


@dataclass(frozen=True)
class Mixtral(_Decoder):
    """Mixtral (Jiang et al., 2024): each token goes through two of the experts."""

    heads: int = 4
    key_heads: int = 2
    feed_forward: int = 128
    experts: int = 4

    def model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(
            MixtralConfig(
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                num_key_value_heads=self.key_heads,
                intermediate_size=self.feed_forward,
                num_local_experts=self.experts,
                max_position_embeddings=self.sequence,
                use_cache=False,
            )
        )


@dataclass(frozen=True)
class Mamba(_Decoder):
    """Mamba (Gu and Dao, 2023): a state is carried from token to token."""

    def model(self) -> nn.Module:
        from transformers import MambaConfig, MambaForCausalLM

        return MambaForCausalLM(
            MambaConfig(
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                use_cache=False,
            )
        )
