"""Small models of every architecture of transformers, by rule from their configurations' names."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, NotByRuleError

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, IMAGE, PATCH = 32, 4, 4, 99, 12, 32, 8
_MOST_ELEMENTS = 30_000_000

_HEADS_OF_MODELS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "SEQUENCE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "MASKED_IMAGE_MODELING", "PRETRAINING", "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIMODAL_LM", "ZERO_SHOT_OBJECT_DETECTION",
    "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "RNNT", "TDT",
)  # fmt: skip

_RULES: tuple[tuple[str, Any], ...] = (
    (r"vocab_size(_or_config_json_file)?$|^n_vocab$|_vocab_size$", VOCABULARY),
    (r"(num_key_value|kv)_heads$|num_kv_heads$|^n_kv_heads$|num_query_groups$", 2),
    (r"num_.*heads$|^n_heads?$|.*_attention_heads$|^num_heads$|^attention_heads$|^heads$", HEADS),
    (r"^(head_dim|attention_head_dim|qk_.*_head_dim|.*_head_dim|d_kv|attention_head_size|head_size|dim_head)$", 8),
    (r"^q_lora_rank$|^kv_lora_rank$|.*_lora_rank$|.*lora_rank.*", 8),
    (r"^(num_hidden_layers|n_layers?|num_layers|.*_layers|layers|n_layer|depth|num_blocks|.*_depth)$", LAYERS),
    (r"^(intermediate_size|.*_intermediate_size|ffn_dim|.*_ffn_dim|d_ff|ffn_hidden_size|n_inner|d_inner|.*mlp_dim"
     r"|dim_feedforward|hidden_dim|feed_forward_size|.*feedforward_dim|ffn_size)$", 2 * WIDTH),
    (r"^(hidden_size|.*hidden_size|d_model|n_embd|embed_dim|.*_embed_dim|embedding_size|dim|.*_dim|model_dim"
     r"|projection_dim|.*_channels_list|decoder_hidden_size|width|.*_embedding_size|encoder_hidden_dim)$", WIDTH),
    (r"^(max_position_embeddings|n_positions|max_.*positions|max_source_positions|max_seq_len|n_ctx|seq_length"
     r"|max_sequence_length)$", 128),
    (r"^image_size$|^img_size$|^input_size$", IMAGE),
    (r"^patch_size$", PATCH),
    (r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts)$", 4),
    (r"^(num_experts_per_tok|num_experts_per_token|moe_k|top_k|experts_per_token|moe_topk)$", 2),
    (r"^num_queries$", 6),
    (r"^(n_group|topk_group|n_groups)$", 1),
)  # fmt: skip
_NO_CHANCE = re.compile(r"drop|layerdrop|noise|mask_(time|feature)_prob|stochastic")


def cases() -> Iterator[Case]:
    """One model of each architecture, with its own loss where it has one."""
    from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

    for family in sorted(CONFIG_MAPPING_NAMES):
        name = _class_name(family)
        if name is not None:
            yield Case("transformers", family, f"{family}.{name}", partial(make, family, name))


def _class_name(family: str) -> str | None:
    from transformers.models.auto import modeling_auto

    for head in _HEADS_OF_MODELS:
        found = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES", {}).get(family)
        if found is not None:
            return found if isinstance(found, str) else str(found[0])
    found = modeling_auto.MODEL_MAPPING_NAMES.get(family)
    return found if found is None or isinstance(found, str) else str(found[0])


def make(family: str, name: str, rows: int) -> tuple[nn.Module, dict[str, Any]]:
    """A small model and the named arguments of a training call.

    Raises:
        NotByRuleError: the rules make none.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    try:
        config = small(CONFIG_MAPPING[family])
        if "CTC" in name and getattr(config, "vocab_size", 0) is None:
            config.vocab_size = VOCABULARY
        kind = getattr(transformers, name)
        with torch.device("meta"):
            elements = sum(param.numel() for param in kind(config).parameters())
        if elements > _MOST_ELEMENTS:
            raise NotByRuleError(f"{elements:,} elements are not small")
        torch.manual_seed(0)
        model = kind(config)
    except Exception as error:
        raise NotByRuleError(f"config: {type(error).__name__}: {error}") from error
    try:
        arguments = Arguments(model, config, name, rows).all()
    except Exception as error:
        raise NotByRuleError(f"arguments: {type(error).__name__}: {error}") from error
    return model, arguments


def small(kind: type[Any]) -> Any:
    """A configuration with small numbers; nested ones too."""
    default = kind()
    values = _small_values(default)
    try:
        # What follows from others is computed anew.
        config = kind(**values)
    except Exception:  # a class that does not take all that it keeps
        config = default
    _settle(config)
    return config


def _small_values(config: Any) -> dict[str, Any]:
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            found[name] = {"model_type": value.model_type, **_small_values(value)}
        elif not name.startswith("_") and (smaller := _smaller(name, value)) != value:
            found[name] = smaller
    return found


def _settle(config: Any) -> None:
    """Sets what a class has not taken, and what is the same for all."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _settle(value)
        elif not name.startswith("_") and (smaller := _smaller(name, value)) != value:
            try:
                setattr(config, name, smaller)
            except (AttributeError, NotImplementedError):
                continue
    layers = next((count for name in ("num_hidden_layers", "num_layers", "n_layer")
                   if isinstance(count := getattr(config, name, None), int)), LAYERS)  # fmt: skip
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(getattr(config, name, None) or ()))
        if kinds and len(getattr(config, name)) != layers:
            try:
                setattr(config, name, [kinds[place % len(kinds)] for place in range(layers)])
            except (AttributeError, NotImplementedError):
                continue
    for name in ("_attn_implementation", "_experts_implementation"):
        setattr(config, name, "eager")
    for name, value in {"pad_token_id": 0, "decoder_start_token_id": 0}.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def _smaller(name: str, value: Any) -> Any:
    """A small value of an item of a configuration, or the same."""
    if name in ("use_cache", "apply_spec_augment"):
        return False
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return 0.0 if _NO_CHANCE.search(name) else value
    if re.search(r"token_(id|index)$", name):
        high = isinstance(value, int) and value >= VOCABULARY
        return VOCABULARY - 1 - sum(map(ord, name)) % 40 if high else value
    if name == "attention_window":
        return [4] * len(value) if isinstance(value, list) else 4
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        if re.search(r"depths|num_blocks|layers$", name):
            return type(value)(min(item, 2) for item in value)
        if re.search(r"hidden_sizes|embed_dims?$|channels|dims$|widths|conv_dim", name):
            return type(value)(item if item < 32 else max(16, item // 8) for item in value)
        limits = {"patch_size": PATCH, "image_size": IMAGE}
        return type(value)(min(item, limits.get(name, item)) for item in value)
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
    if isinstance(value, int):
        limit = next((limit for pattern, limit in _RULES if re.search(pattern, name)), None)
        return value if limit is None else min(value, limit)
    return value


class Arguments:
    """The named arguments of a call, as the signature of its forward asks."""

    def __init__(self, model: nn.Module, config: Any, name: str, rows: int) -> None:
        self._config = config
        self._text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._name = name
        self._rows = rows
        self._forward = inspect.signature(model.forward).parameters
        self._main = getattr(model, "main_input_name", "input_ids")
        self._random = torch.Generator().manual_seed(1)

    def all(self) -> dict[str, Any]:
        """All that the rules know of."""
        found: dict[str, Any] = {}
        makers = {
            "input_ids": self._ids,
            "pixel_values": self._pixels,
            "input_values": self._wave,
            "input_features": self._features,
            "attention_mask": self._mask,
        }
        kinds = ("input_ids", "pixel_values", "input_values", "input_features")
        needed = [name for name, item in self._forward.items() if item.default is item.empty and name in kinds]
        named = [name for name in kinds if name in self._forward]
        wanted = list(dict.fromkeys(needed or [self._main if self._main in named else named[0]] if named else []))
        if not wanted:
            raise NotByRuleError(f"none of {', '.join(self._forward)} is known")
        for name in wanted:
            found[name] = makers[name]()
        if "input_features" in found:
            frames = found["input_features"].shape[1]
            for name in ("attention_mask", "input_features_mask", "feature_attention_mask"):
                if name in self._forward:
                    found[name] = torch.ones(self._rows, frames, dtype=torch.long)
        if "attention_mask" in self._forward and "input_ids" in found:
            found["attention_mask"] = self._mask()
        if "decoder_input_ids" in self._forward and not self._makes_decoder_inputs():
            found["decoder_input_ids"] = self._ids()
        labels = self._labels(found)
        if labels is not None and "labels" in self._forward:
            found["labels"] = labels
        for name, value in self._labels_by_name().items():
            if name in self._forward:
                found[name] = value
        return found

    def _makes_decoder_inputs(self) -> bool:
        return "labels" in self._forward and re.search("Conditional|Seq2Seq", self._name) is not None

    def _vocabulary(self) -> int:
        for config in (self._text, self._config):
            size = getattr(config, "vocab_size", None)
            if isinstance(size, int) and size > 1:
                return min(size, VOCABULARY)
        return VOCABULARY

    def _integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._random)

    def _ids(self) -> Tensor:
        # Special tokens lie at both ends.
        high = self._vocabulary()
        low = 4 if high > 20 else 0
        high = min(high, VOCABULARY - 45) if high > 60 else high
        return low + self._integers(high - low, self._rows, LENGTH)

    def _mask(self) -> Tensor:
        mask = torch.ones(self._rows, LENGTH, dtype=torch.long)
        mask[0, -3:] = 0
        return mask

    def _pixels(self) -> Tensor:
        config = self._config
        vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
        size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 64
        size = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        frames = [config.num_frames] if hasattr(config, "num_frames") else []
        return torch.randn(self._rows, *frames, channels, *size, generator=self._random)

    def _wave(self) -> Tensor:
        strides = getattr(self._config, "conv_stride", None)
        return torch.randn(self._rows, 16 * math.prod(strides) if strides else 3200, generator=self._random)

    def _features(self) -> Tensor:
        config = (
            getattr(self._config, "audio_config", None) or getattr(self._config, "encoder_config", None) or self._config
        )
        bins = next(
            (
                getattr(config, name)
                for name in ("num_mel_bins", "input_feat_per_channel", "feature_size")
                if isinstance(getattr(config, name, None), int)
            ),
            80,
        )
        if "whisper" in str(getattr(self._config, "model_type", "")):
            return torch.randn(self._rows, bins, 2 * config.max_source_positions, generator=self._random)
        return torch.randn(self._rows, 64, bins, generator=self._random)

    def _labels(self, found: dict[str, Any]) -> Any:
        name, rows = self._name, self._rows
        classes = int(getattr(self._config, "num_labels", 2) or 2)
        if re.search("CTC|RNNT|TDT", name):
            return 1 + self._integers(self._vocabulary() - 2, rows, 5)
        if re.search("Detection|Segmentation", name) and re.search("Detection|Universal|Instance", name):
            return [
                {
                    "class_labels": self._integers(classes, 2),
                    "boxes": 0.25 + 0.5 * torch.rand(2, 4, generator=self._random),
                }
                for _ in range(rows)
            ]
        if "SemanticSegmentation" in name:
            return self._integers(classes, rows, *found["pixel_values"].shape[-2:])
        if "Depth" in name:
            return torch.rand(rows, *found["pixel_values"].shape[-2:], generator=self._random)
        if re.search("LM|Conditional|Pretraining|PreTraining|Causal|Seq2Seq", name) and self._has_text(found):
            labels = self._ids()
            labels[0, :4] = -100
            return labels
        if re.search("SequenceClassification|ImageClassification|AudioClassification|VideoClassification", name):
            return self._integers(classes, rows)
        return None

    def _has_text(self, found: dict[str, Any]) -> bool:
        return "input_ids" in found or "decoder_input_ids" in self._forward

    def _labels_by_name(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if "QuestionAnswering" in self._name:
            found["start_positions"] = self._integers(LENGTH, self._rows)
            found["end_positions"] = self._integers(LENGTH, self._rows)
        if "return_loss" in self._forward and "ZeroShot" not in self._name:
            found["return_loss"] = True
        return found
