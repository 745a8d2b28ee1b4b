"""Small networks of diffusers, by rule from the names of their items and arguments."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, NotByRuleError, loss_of, quiet

_MOST_ELEMENTS = 30_000_000
_HEADS, _HEAD_WIDTH, _LAYERS = 4, 16, 4
_WIDTH = _HEADS * _HEAD_WIDTH
_SIDE, _FRAMES, _WORDS = 16, 5, 7
_ADDED = re.compile(
    r"ControlNet|Adapter|Config$|Mixin$|AutoModel|Conditioner$|ConditionEncoder$|ImageProjection|Bank$|BackendName$"
)
"""Names of what is no network of its own, but added to one."""

_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"^(num_layers|num_single_layers|n_layers|nlayers|depth|num_hidden_layers|num_.*_blocks|num_blocks)$", _LAYERS),
    (r"^(num_refiner_layers|n_refiner_layers|.*_per_block|num_res_blocks|.*refiner.*layers)$", 1),
    (r"^(num_.*heads|n_heads|nheads)$", _HEADS),
    (r"^(attention_head_dim|head_dim|cross_attention_head_dim)$", _HEAD_WIDTH),
    (r"^(cross_attention_dim|hidden_size|inner_dim|dim|model_dim|text_embed_dim|text_dim|in_text_dim2?|encoder_hidden_size"
     r"|caption_channels|caption_projection_dim|joint_attention_dim|pooled_projection_dim|condition_dim|cap_feat_dim"
     r"|time_embed_dim|time_dim|context_in_dim|embedding_dim|token_dim|encoder_hid_dim|hidden_dim)$", _WIDTH),
    (r"^(ffn_dim|intermediate_size|ff_dim|.*mlp_dim)$", 2 * _WIDTH),
    (r"^freq_dim$", 32),
    (r"^norm_num_groups$", 8),
    (r"^(base_dim|base_channels|channels)$", 16),
    (r"^(sample_size|sample_height|sample_width|resolution)$", _SIDE),
    (r"^sample_frames$", _FRAMES),
    (r"^(rope_max_seq_len|pos_embed_max_size|max_text_seq_length|max_position_embeddings|text_len)$", 64),
    (r"^(vocab_size|codebook_size)$", 99),
    (r"^num_embeds_ada_norm$", 1000),
)  # fmt: skip
_OTHER_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"(_dim|_channels|_features|hidden|_width|_embed)s?$", _WIDTH),
    (r"(layers|blocks)$|^num_.*experts", _LAYERS),
)
_WIDTHS = re.compile(r"(block_out_channels|encoder_hidden_dims|layer_channels|.*_channels_list)$")
_AXES = re.compile(r"^(axes_dims?(_rope)?|rope_axes_dim|rope_dim_list|axes_dim)$")
_PARTS_OF_HEAD = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}
_TEXT_WIDTHS = ("cross_attention_dim", "joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim",
                "in_text_dim", "cap_feat_dim", "context_in_dim", "encoder_hid_dim")  # fmt: skip

_LACKING = {
    "in_channels": 8,
    "num_attention_heads": _HEADS,
    "attention_head_dim": _HEAD_WIDTH,
    "num_key_value_heads": _HEADS,
    "patch_size": 2,
    "sample_size": _SIDE,
    "cross_attention_dim": _WIDTH,
    "caption_channels": _WIDTH,
}
"""What an item is that has no value by default, where some networks need one."""


@dataclass(frozen=True)
class _Scale:
    """What becomes small.

    Attributes:
        narrow: widths whose names say what they are of.
        narrow_all: whatever may be a width.
        fill: items without a value get one.
    """

    narrow: bool = True
    narrow_all: bool = False
    fill: bool = False


_SCALES = (
    _Scale(),
    _Scale(fill=True),
    _Scale(narrow_all=True),
    _Scale(narrow_all=True, fill=True),
    _Scale(narrow=False),
)
"""In the order in which they are tried."""


def cases() -> Iterator[Case]:
    """One network of each design."""
    import diffusers.models

    for name in diffusers.models.__all__:  # type: ignore[attr-defined]  # it is made when it is imported
        if name[:1].isupper() and not _ADDED.search(name):
            yield Case("diffusers", name, name, partial(make, name))


def make(name: str, rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A small network and the named arguments of a training call; its dropout is as by default in any case.

    Raises:
        NotByRuleError: the rules make none.
    """
    rung = _rung(name, rows)
    model = _made(name, rung[0])
    return model, _arguments(model, rows, *rung[1:])


@cache
def _rung(name: str, rows: int) -> tuple[_Scale, str, torch.dtype]:
    """The scale, the shape of samples and the type of times with which it runs."""
    first = ""
    for scale in _SCALES:
        try:
            model = quiet(_made(name, scale)).double()
        except Exception as error:  # whatever a class says to numbers that do not fit together
            first = first or f"config: {type(error).__name__}: {error}"
            continue
        for shape, times in product(_SHAPES, (torch.int64, torch.float32)):
            try:
                given = _arguments(model, rows, shape, times)
                loss_of(model(**{name: _double(item) for name, item in given.items()})).backward()
                return scale, shape, times
            except Exception as error:  # likewise
                first = first or f"{type(error).__name__}: {error}"
    raise NotByRuleError(first)


def _double(item: Any) -> Any:
    return item.double() if isinstance(item, Tensor) and item.is_floating_point() else item


def _made(name: str, scale: _Scale) -> nn.Module:
    import diffusers.models

    warnings.simplefilter("ignore")
    kind = getattr(diffusers.models, name)
    known = inspect.signature(kind.__init__).parameters.values()
    own = {item.name: _small(item.name, item.default, scale) for item in known if item.default is not item.empty}
    with torch.device("meta"):
        elements = sum(param.numel() for param in kind(**own).parameters())
    if elements > _MOST_ELEMENTS:
        raise NotByRuleError(f"{elements:,} elements are not small")
    torch.manual_seed(0)
    return kind(**own)  # type: ignore[no-any-return]  # a class of diffusers


def _small(name: str, value: Any, scale: _Scale) -> Any:
    """A small value of an item, or the same."""
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        if _AXES.match(name) and scale.narrow:
            return type(value)(_PARTS_OF_HEAD.get(len(value), value))
        if _WIDTHS.search(name):
            return type(value)(32 for _ in value)
        return type(value)(_small(name, item, scale) for item in value)
    if value is None:
        return _LACKING.get(name) if scale.fill else None
    if type(value) is not int:
        return value
    rules = (*_NUMBERS, *_OTHER_NUMBERS) if scale.narrow_all else _NUMBERS
    limit = next((limit for pattern, limit in rules if re.search(pattern, name)), value)
    return min(value, limit) if scale.narrow or limit < _WIDTH else value


_SHAPES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "image": lambda rows, channels: (rows, channels, _SIDE, _SIDE),
    "tokens": lambda rows, channels: (rows, 25, channels),
    "video": lambda rows, channels: (rows, channels, _FRAMES, _SIDE, _SIDE),
    "frames": lambda rows, channels: (rows, _FRAMES, channels, _SIDE, _SIDE),
    "sound": lambda rows, channels: (rows, channels, 1024),
    "large image": lambda rows, channels: (rows, channels, 64, 64),
    "images last": lambda rows, channels: (rows, _FRAMES, _SIDE, _SIDE, channels),
}
"""By name, in the order in which they are tried."""


def _arguments(model: nn.Module, rows: int, shape: str, times: torch.dtype) -> dict[str, Any]:
    config: Any = model.config
    random = torch.Generator().manual_seed(1)
    known = inspect.signature(model.forward).parameters

    def noise(*extents: int) -> Tensor:
        return torch.randn(extents, generator=random)

    def number(*names: str, default: int = _WIDTH) -> int:
        found = (config.get(name) for name in names)
        return next((item for item in found if isinstance(item, int)), default)

    sample = noise(*_SHAPES[shape](rows, number("in_channels", "in_visual_dim", "audio_channels", default=3)))
    axes = next((len(config[name]) for name in config if _AXES.match(name) and config[name]), 3)
    makers: dict[str, Callable[[], Any]] = {
        "sample": lambda: sample,
        "hidden_states": lambda: sample,
        "timestep": lambda: torch.arange(1, rows + 1).to(times),
        "encoder_hidden_states": lambda: noise(rows, _WORDS, number(*_TEXT_WIDTHS)),
        "encoder_attention_mask": lambda: torch.ones(rows, _WORDS, dtype=torch.bool),
        "encoder_hidden_states_mask": lambda: torch.ones(rows, _WORDS, dtype=torch.bool),
        "pooled_projections": lambda: noise(rows, number("pooled_projection_dim", "in_text_dim2")),
        "img_ids": lambda: torch.stack([torch.arange(25) // 5] * (axes - 1) + [torch.arange(25) % 5], 1).float(),
        "txt_ids": lambda: torch.zeros(_WORDS, axes),
        "class_labels": lambda: torch.arange(rows),
        "added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None},
        "original_size": lambda: torch.full((rows, 2), float(_SIDE)),
        "target_size": lambda: torch.full((rows, 2), float(_SIDE)),
        "crop_coords": lambda: torch.zeros(rows, 2),
        "proj_embedding": lambda: noise(rows, number("embedding_dim")),
        "added_time_ids": lambda: noise(rows, 3),
        "r_timestep": lambda: torch.zeros(rows).to(times),
        "timestep_r": lambda: torch.zeros(rows).to(times),
        "fps": lambda: torch.full((rows,), 8),
        "num_frames": lambda: _FRAMES,
        "height": lambda: 5,
        "width": lambda: 1,
    }
    given = {"guidance": lambda: torch.ones(rows)} if config.get("guidance_embeds") else {}
    needed = [name for name, item in known.items() if item.default is item.empty]
    usual = ("encoder_hidden_states", "timestep", "pooled_projections", "img_ids", "txt_ids", "encoder_attention_mask",
             "encoder_hidden_states_mask", "crop_coords", "target_size", "original_size", *given,
             *(("num_frames", "height", "width") if shape == "tokens" else ()))  # fmt: skip
    wanted = [*needed, *(name for name in usual if name in known and name not in needed)]
    if config.get("norm_type") == "ada_norm_zero":
        wanted.append("class_labels")
    lacking = [name for name in needed if name not in makers]
    if lacking:
        raise NotByRuleError(f"{', '.join(lacking)} is not known")
    return {name: {**makers, **given}[name]() for name in wanted if name in known}
