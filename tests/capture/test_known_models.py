"""Captured public architectures equal the models, at a batch size that was not captured."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

VOCABULARY = 61
LENGTH = 9


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, LENGTH))


def images(rows: int, size: int) -> Any:
    return (torch.randn(rows, 3, size, size, dtype=torch.double),), {}


def bert_call(rows: int) -> Any:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[0, -3:] = 0
    labels = {"labels": tokens(rows), "next_sentence_label": torch.randint(0, 2, (rows,))}
    return (), {"input_ids": tokens(rows), "attention_mask": mask, **labels}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_pretraining(attention: str, assert_equals_model: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        attn_implementation=attention,
    )  # fmt: skip
    captured = assert_equals_model(transformers.BertForPreTraining(config).double(), bert_call)
    graph = json.loads(captured.graph_json)
    tied = [param for param in graph["params"] if "aliases" in param]
    assert [param["name"] for param in tied] == ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    modules = {op["module"] for op in graph["ops"]}
    assert "bert.encoder.layer.1.attention.self" in modules


def test_gpt2_with_labels(assert_equals_model: Any) -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config).double()

    def call(rows: int) -> Any:
        ids = tokens(rows)
        return (), {"input_ids": ids, "labels": ids.clone()}

    assert_equals_model(model, call)
    assert_equals_model(model.eval(), call, (1, 4))


def test_t5_with_labels(assert_equals_model: Any) -> None:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).double()
    assert_equals_model(model, lambda rows: ((), {"input_ids": tokens(rows), "labels": tokens(rows)}))


def test_llama_with_labels(assert_equals_model: Any) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    assert_equals_model(model, lambda rows: ((), {"input_ids": tokens(rows), "labels": tokens(rows)}))


def test_resnet50(assert_equals_model: Any) -> None:
    assert_equals_model(torchvision.models.resnet50(num_classes=5).double(), lambda rows: images(rows, 32))


def test_vision_transformer(assert_equals_model: Any) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, drop_path_rate=0.2, proj_drop_rate=0.1
    )
    assert_equals_model(model.double(), lambda rows: images(rows, 32))
