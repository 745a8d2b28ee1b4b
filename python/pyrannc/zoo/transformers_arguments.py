"""The named arguments of a training call of a model of transformers, by rule from the names in its signature."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .case import NotByRuleError
from .transformers_configs import VOCABULARY

LENGTH = 12
_SIDE = 4
"""Patches along each side of an image."""
_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")


@dataclass(frozen=True)
class Way:
    """How much of what a signature names is given.

    Attributes:
        wide: all that is known, not only what the model is mainly for.
        labels: what its own loss needs.
        other: sounds have frames last, or a channel, images come in pairs or in patches.
    """

    wide: bool = False
    labels: bool = True
    other: bool = False


WAYS = tuple(Way(wide, labels, other) for other in (False, True) for labels in (True, False) for wide in (False, True))
"""In the order in which they are tried."""


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

    def all(self, way: Way) -> dict[str, Any]:
        """What the rules know of, in a way."""
        makers = self._makers(way)
        main = ("input_ids", "pixel_values", "input_values", "input_features")
        needed = [name for name, item in self._forward.items() if item.default is item.empty and name in makers]
        named = [name for name in main if name in self._forward]
        usual = [self._main if self._main in makers and self._main in self._forward else named[0]] if named else []
        wanted = needed or usual or [name for name in makers if name in self._forward]
        if way.wide:
            wanted = [name for name in makers if name in self._forward]
        if not wanted:
            raise NotByRuleError(f"none of {', '.join(self._forward)} is known")
        found: dict[str, Any] = {name: makers[name]() for name in dict.fromkeys(wanted)}
        if "input_features" in found:
            frames = found["input_features"].shape[1]
            for name in ("attention_mask", "input_features_mask", "feature_attention_mask"):
                if name in self._forward:
                    found[name] = torch.ones(self._rows, frames, dtype=torch.long)
        if "attention_mask" in self._forward and "input_ids" in found:
            found["attention_mask"] = self._mask()
        if "decoder_input_ids" in self._forward and not (self._makes_decoder_inputs() and way.labels):
            found["decoder_input_ids"] = self._ids()
        labels = self._labels(found) if way.labels else None
        if labels is not None and "labels" in self._forward:
            found["labels"] = labels
        for name, value in self._labels_by_name().items() if way.labels else ():
            if name in self._forward:
                found[name] = value
        return found

    def _makers(self, way: Way) -> dict[str, Callable[[], Any]]:
        """What makes an argument, by name."""
        return {
            "input_ids": self._ids,
            "pixel_values": self._image_pairs if way.other else self._pixels,
            "input_values": self._sound if way.other else self._wave,
            "input_features": self._bins_first if way.other else self._features,
            "bbox": self._boxes,
            "qformer_input_ids": self._ids,
            **self._patches(),
            **self._series(),
            **self._decisions(),
        }

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

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)

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
        return self._normal(self._rows, *frames, channels, *size)

    def _image_pairs(self) -> Tensor:
        image = self._pixels()
        return torch.stack([image, image.flip(-1)], 1)

    def _patches(self) -> dict[str, Callable[[], Any]]:
        """Those of models whose images come cut into patches, of all images in one tensor or of each in its own."""
        config, rows = self._config, self._rows
        if not isinstance(patch := getattr(config, "patch_size", None), int):
            return {}
        channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3
        width = channels * patch * patch * (getattr(config, "temporal_patch_size", None) or 1)
        if "grid_thw" in self._forward:
            first = "hidden_states" if "hidden_states" in self._forward else "pixel_values"
            return {
                first: lambda: self._normal(rows * _SIDE * _SIDE, width),
                "grid_thw": lambda: torch.tensor([[1, _SIDE, _SIDE]] * rows),
                "merge_sizes": lambda: torch.ones(rows, dtype=torch.long),
            }
        if "spatial_shapes" in self._forward:
            return {
                "pixel_values": lambda: self._normal(rows, _SIDE * _SIDE, width),
                "pixel_attention_mask": lambda: torch.ones(rows, _SIDE * _SIDE, dtype=torch.long),
                "spatial_shapes": lambda: torch.tensor([[_SIDE, _SIDE]] * rows),
            }
        if "pixel_position_ids" in self._forward:
            places = torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE))
            return {
                "pixel_values": lambda: self._normal(rows, _SIDE * _SIDE, width),
                "pixel_position_ids": lambda: places.expand(rows, -1, -1).contiguous(),
            }
        return {}

    def _wave(self) -> Tensor:
        strides = getattr(self._config, "conv_stride", None)
        return self._normal(self._rows, 16 * math.prod(strides) if strides else 3200)

    def _sound(self) -> Tensor:
        spectrogram = [getattr(self._config, name, None) for name in ("max_length", "num_mel_bins")]
        sizes = [size for size in spectrogram if isinstance(size, int)]
        return self._normal(self._rows, *(sizes if len(sizes) == len(spectrogram) else (1, 3200)))

    def _features(self) -> Tensor:
        if "whisper" in str(getattr(self._config, "model_type", "")):
            return self._bins_first()
        return self._normal(self._rows, 64, self._bins())

    def _bins_first(self) -> Tensor:
        frames = getattr(self._sounds(), "max_source_positions", None) or 32
        return self._normal(self._rows, self._bins(), 2 * frames)

    def _sounds(self) -> Any:
        parts = (getattr(self._config, name, None) for name in ("audio_config", "encoder_config"))
        return next((part for part in parts if part is not None), self._config)

    def _bins(self) -> int:
        found = (getattr(self._sounds(), name, None) for name in _BINS)
        return next((size for size in found if isinstance(size, int)), 80)

    def _boxes(self) -> Tensor:
        corners = self._integers(50, self._rows, LENGTH, 2)
        return torch.cat([corners, corners + 1 + self._integers(20, self._rows, LENGTH, 2)], -1)

    def _series(self) -> dict[str, Callable[[], Any]]:
        """Those of models of time series."""
        config = self._config
        length = getattr(config, "context_length", None)
        if not isinstance(length, int):
            return {}
        past = length + max(getattr(config, "lags_sequence", None) or [0])
        ahead = getattr(config, "prediction_length", None) or 1
        channels = getattr(config, "num_input_channels", None)
        own = [channels] if channels else []
        times = getattr(config, "num_time_features", 0)
        return {
            "past_values": lambda: self._normal(self._rows, past, *own),
            "past_time_features": lambda: self._normal(self._rows, past, times),
            "past_observed_mask": lambda: torch.ones(self._rows, past, *own),
            "future_values": lambda: self._normal(self._rows, ahead, *own),
            "future_time_features": lambda: self._normal(self._rows, ahead, times),
        }

    def _decisions(self) -> dict[str, Callable[[], Any]]:
        """Those of models of what an agent does."""
        config, rows = self._config, self._rows
        if not hasattr(config, "state_dim"):
            return {}
        return {
            "states": lambda: self._normal(rows, LENGTH, config.state_dim),
            "actions": lambda: self._normal(rows, LENGTH, config.act_dim),
            "rewards": lambda: self._normal(rows, LENGTH, 1),
            "returns_to_go": lambda: self._normal(rows, LENGTH, 1),
            "timesteps": lambda: torch.arange(LENGTH).expand(rows, LENGTH).contiguous(),
        }

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
