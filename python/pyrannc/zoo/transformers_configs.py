"""Small configurations of transformers' classes, by rule from the names of their items."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

WIDTH, HEADS, LAYERS, VOCABULARY, IMAGE, PATCH = 32, 4, 4, 99, 32, 8

_COUNTS: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_or_config_json_file)?$|^n_vocab$|_vocab$|^vocab_size_", VOCABULARY),
    (r"shared_layers$", 0),
    (r"^(max_position_embeddings|n_positions|max_.*positions|max_source_positions|max_seq_len|n_ctx|seq_length"
     r"|max_sequence_length)$", 128),
    (r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts)$", 4),
    (r"^(num_experts_per_tok|num_experts_per_token|moe_k|top_k|experts_per_token|moe_topk)$", 2),
    (r"^num_queries$", 6),
    (r"^(n_group|topk_group)$", 1),
    (r"chunk_size$", 8),
    (r"^max_length$", 128),
    (r"^(num|n)_shared_experts$", 1),
    (r"^prediction_length$", 4),
)  # fmt: skip
_OWN_COUNTS: tuple[tuple[str, int], ...] = (
    (r"^(num_hidden_layers|n_layers?|num_layers|.*_layers|layers|n_layer|depth|num_blocks|.*_depth)$", LAYERS),
    (r"^image_size$|^img_size$|^input_size$", IMAGE),
    (r"^patch_size$", PATCH),
)
_LARGE_IMAGES = ((r"^image_size$|^img_size$|^input_size$", 224),)
_KEY_HEADS = r"(num_key_value|kv)_heads$|num_kv_heads$|^n_kv_heads$|num_query_groups$"
_HEADS = r"num_.*heads$|^n_heads?$|.*_attention_heads$|^num_heads$|^attention_heads$|^heads$|n_heads$"
_HEAD_WIDTH = (
    r"^(head_dim|attention_head_dim|qk_.*_head_dim|.*_head_dim|d_kv|attention_head_size|head_size|dim_head|rotary_dim"
    r"|.*_d_head)$"
)
_RANK = r".*lora_rank.*"
_INNER = (
    r"^(intermediate_size|.*_intermediate_size|ffn_dim|.*_ffn_dim|d_ff|ffn_hidden_size|n_inner|d_inner|.*mlp_dim"
    r"|dim_feedforward|hidden_dim|feature_size|feed_forward_size|.*feedforward_dim|ffn_size)$"
)
_OUTER = (
    r"^(hidden_size|.*hidden_size|d_model|n_embd|embed_dim|.*_embed_dim|embedding_size|dim|.*_dim|model_dim"
    r"|projection_dim|.*_channels_list|decoder_hidden_size|width|.*_embedding_size|encoder_hidden_dim|.*_d_ssm"
    r"|upsample_groups|coordinate_size|shape_size)$"
)
_NO_CHANCE = re.compile(r"drop|layerdrop|noise|mask_(time|feature)_prob|stochastic")
_LARGE = 1 << 40
_ONE_FRAME = 1e6
"""A rate of speech at which each token has one frame: those that random parameters give are millions."""
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


@dataclass(frozen=True)
class Scale:
    """How large a configuration's numbers may be.

    Attributes:
        tiny: widths, heads and their sizes have upper bounds.
        width: all widths are divided by it.
        heads: numbers of heads are divided by it.
        head_width: sizes of heads are divided by it.
        fill: items without a value get one, and there are as many heads of keys as of queries.
        own_counts: of layers, and the sizes of images and patches, as they are.
        anew: what follows from other items is computed anew by the class; otherwise its default is changed in place.
        chance: what makes models draw random numbers stays as it is.
    """

    tiny: bool = False
    width: int = 1
    heads: int = 1
    head_width: int = 1
    fill: bool = False
    own_counts: bool = False
    anew: bool = True
    chance: bool = False

    def smaller(self, name: str, value: Any) -> Any:
        """A small value of an item of a configuration, or the same."""
        if name == "use_cache" or (name == "apply_spec_augment" and not self.chance):
            return False
        if value is None and self.fill:
            return self._filled(name)
        if isinstance(value, bool) or value is None:
            return value
        if isinstance(value, float):
            if name == "depth_coefficient":
                return min(value, 0.5)
            if name == "speaking_rate":
                return _ONE_FRAME
            return value if self.chance else _without_chance(name, value)
        if re.search(r"token_(id|index)$", name):
            high = isinstance(value, int) and value >= VOCABULARY
            return VOCABULARY - 1 - sum(map(ord, name)) % 40 if high else value
        if name == "attention_window":
            return [4] * len(value) if isinstance(value, list) else 4
        if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            return type(value)(self._list_item(name, item) for item in value)
        if isinstance(value, dict) and "mrope_section" in value and self.tiny:
            return {**value, "mrope_section": [2, 1, 1]}
        if name == "backbone" and value == "resnet50":
            return "resnet10t"
        return self._number(name, value) if isinstance(value, int) else value

    def _filled(self, name: str) -> Any:
        """A value of an item that has none, where its name tells of a number."""
        found = self._number(name, _LARGE)
        return None if found >= _LARGE // 8 else found

    def _list_item(self, name: str, item: int) -> int:
        if re.search(r"depths|num_blocks|layers$", name):
            return item if self.own_counts else min(item, 2)
        if re.search(r"hidden_sizes|embed_dims?$|channels|dims$|widths|conv_dim", name):
            by = 8 if self.tiny else self.width
            return item if item < 32 else max(16, item // by)
        limits = {"image_size": 224} if self.own_counts else {"image_size": IMAGE, "patch_size": PATCH}
        return min(item, limits.get(name, item))

    def _number(self, name: str, value: int) -> int:
        counts = (*_COUNTS, *(_LARGE_IMAGES if self.own_counts else _OWN_COUNTS))
        limit = next((limit for pattern, limit in counts if re.search(pattern, name)), None)
        if limit is not None:
            return min(value, limit)
        for pattern, bound, by in (
            (_KEY_HEADS, HEADS if self.fill else HEADS // 2, self.heads),
            (_HEADS, HEADS, self.heads),
            (_HEAD_WIDTH, 8, self.head_width),
            (_RANK, 8, self.head_width),
            (_INNER, 2 * WIDTH, self.width),
            (_OUTER, WIDTH, self.width),
            (r"^n_groups$", 1, self.heads),
        ):
            if re.search(pattern, name):
                return min(value, bound) if self.tiny else max(1, value // by)
        return value


def _without_chance(name: str, value: float) -> float:
    if name == "pos_embed_rescale":
        return 1.0  # of a random factor between it and its inverse
    return 0.0 if _NO_CHANCE.search(name) else value


SCALES = (
    Scale(tiny=True),
    Scale(tiny=True, anew=False),
    Scale(tiny=True, fill=True),
    Scale(tiny=True, fill=True, anew=False),
    Scale(width=8, heads=8, fill=True),
    Scale(width=8, heads=8, fill=True, anew=False),
    Scale(width=8, head_width=8, fill=True),
    Scale(width=8, head_width=8, fill=True, anew=False),
    Scale(width=8, head_width=8, own_counts=True, anew=False),
    Scale(),
    Scale(anew=False),
    Scale(own_counts=True, anew=False),
)
"""The rungs of a ladder: the first on which a model runs is taken.

Bounds for all widths; fewer heads, each of its own size; heads of a smaller size, each there; own widths.
"""


def small(kind: type[Any], scale: Scale) -> Any:
    """A configuration with small numbers; nested ones too."""
    with _without_hub():
        default = _default(kind)
        config = default
        if scale.anew:
            try:
                config = kind(**_small_values(default, scale))
            except Exception:  # a class that does not take all that it keeps
                config = default
    _settle(config, scale)
    return config


@contextmanager
def _without_hub() -> Iterator[None]:
    """A part that the hub describes is described by its name, as models of timm are."""
    from transformers import AutoConfig, TimmWrapperConfig

    def described(name: str, **items: Any) -> Any:
        owner, _, model = name.partition("/")
        if owner != "timm":
            raise OSError(f"{name} is described by the hub alone")
        return TimmWrapperConfig(architecture=model.partition(".")[0], **items)

    with patch.object(AutoConfig, "from_pretrained", described):
        yield


def _default(kind: type[Any]) -> Any:
    """The default of a class; of one that has none, with parts of common kinds."""
    from transformers import BertConfig, ViTConfig, Wav2Vec2Config

    try:
        return kind()
    except ValueError:
        reads = Wav2Vec2Config() if "speech" in kind.model_type else BertConfig()
        if hasattr(kind, "from_encoder_decoder_configs"):
            return kind.from_encoder_decoder_configs(reads, BertConfig())
        return kind.from_vision_text_configs(ViTConfig(), BertConfig())


def _items(config: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in list(vars(config).items()) if not name.startswith("_"))


def _small_values(config: Any, scale: Scale) -> dict[str, Any]:
    from transformers import PretrainedConfig

    found: dict[str, Any] = {}
    for name, value in _items(config):
        if isinstance(value, PretrainedConfig):
            found[name] = {"model_type": value.model_type, **_small_values(value, scale)}
        elif (smaller := scale.smaller(name, value)) != value:
            found[name] = smaller
    return found


def _settle(config: Any, scale: Scale) -> None:
    """Sets what a class has not taken, and what is the same for all."""
    from transformers import PretrainedConfig

    for name, value in _items(config):
        if isinstance(value, PretrainedConfig):
            _settle(value, scale)
        elif (smaller := scale.smaller(name, value)) != value:
            _set(config, name, smaller)
    layers = next((count for name in ("num_hidden_layers", "num_layers", "n_layer")
                   if isinstance(count := getattr(config, name, None), int)), LAYERS)  # fmt: skip
    for name in _LAYER_LISTS:
        if scale.fill and getattr(config, name, ()) is None:
            _set(config, name, ["full_attention"] * layers)
        kinds = list(dict.fromkeys(getattr(config, name, None) or ()))
        if kinds and len(getattr(config, name)) != layers:
            _set(config, name, [kinds[place % len(kinds)] for place in range(layers)])
    for name in ("_attn_implementation", "_experts_implementation"):
        setattr(config, name, "eager")
    for name, value in {"pad_token_id": 0, "decoder_start_token_id": 0}.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError):
        return
