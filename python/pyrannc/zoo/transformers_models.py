"""Small models of every architecture of transformers, by rule from their configurations' names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from pyrannc.capture import flatten

from .case import Case, NotByRuleError, loss_of, quiet
from .transformers_arguments import WAYS, Arguments, Way
from .transformers_configs import SCALES, VOCABULARY, Scale, small

_MOST_ELEMENTS = 30_000_000

_HEADS_OF_MODELS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "SEQUENCE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "MASKED_IMAGE_MODELING", "PRETRAINING", "TIME_SERIES_PREDICTION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIMODAL_LM", "ZERO_SHOT_OBJECT_DETECTION",
    "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "RNNT", "TDT",
)  # fmt: skip


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


def make(family: str, name: str, rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A small model and the named arguments of a training call: the first of those that the rules give that runs.

    Args:
        as_they_are: its configuration keeps what makes it draw random numbers.

    Raises:
        NotByRuleError: the rules make none.
    """
    scale, way = _rung(family, name, rows)
    model, config = _made(family, name, replace(scale, chance=as_they_are))
    return model, Arguments(model, config, name, rows).all(way)


@cache
def _rung(family: str, name: str, rows: int) -> tuple[Scale, Way]:
    """The first scale and way of arguments with which a forward and a backward run."""
    first = ""
    for scale in SCALES:
        try:
            made = _made(family, name, scale)
        except Exception as error:
            first = first or f"config: {type(error).__name__}: {error}"
            continue
        tried: set[str] = set()
        for way in WAYS:
            try:
                arguments = Arguments(*made, name, rows).all(way)
                if (known := _described(arguments)) not in tried:
                    tried.add(known)
                    _run(made[0], arguments)
                    return scale, way
            except Exception as error:
                first = first or f"{type(error).__name__}: {error}"
    raise NotByRuleError(first)


def _made(family: str, name: str, scale: Scale) -> tuple[nn.Module, Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config = _of_class(small(CONFIG_MAPPING[family], scale), kind)
    if "CTC" in name and getattr(config, "vocab_size", 0) is None:
        config.vocab_size = VOCABULARY
    if "LMHead" in name and getattr(config, "is_decoder", None) is False and scale.fill:
        config.is_decoder = True
    with torch.device("meta"):
        elements = sum(param.numel() for param in kind(config).parameters())
    if elements > _MOST_ELEMENTS:
        raise NotByRuleError(f"{elements:,} elements are not small")
    torch.manual_seed(0)
    return kind(config), config


def _of_class(config: Any, kind: type[Any]) -> Any:
    """The configuration, or that part of it that a class of models takes."""
    wanted = getattr(kind, "config_class", None) or type(config)
    parts = [config, *vars(config).values()]
    return next((part for part in parts if isinstance(part, wanted)), config)


def _described(arguments: dict[str, Any]) -> str:
    tensors, structure = flatten(arguments)
    return repr((structure.key, sorted(arguments), [tensor.shape for tensor in tensors]))


def _run(model: nn.Module, arguments: dict[str, Any]) -> None:
    """A forward and a backward as they will be."""
    tensors, structure = flatten(arguments)
    kind = torch.get_default_dtype()
    given = structure.rebuild([tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in tensors])
    loss_of(quiet(model).to(kind)(**given)).backward()
