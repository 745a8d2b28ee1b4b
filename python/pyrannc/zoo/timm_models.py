"""The smallest model of every family of timm."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Case, NotByRuleError

_MOST_ELEMENTS = 60_000_000
_SMALL = ("atto", "femto", "pico", "nano", "test", "tiny", "xxs", "xs", "small", "_s", "mini", "0", "1")


def cases() -> Iterator[Case]:
    """One model of each family."""
    import timm

    families: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        families[timm.model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    for family in sorted(families):
        name = min(families[family], key=_size)
        yield Case("timm", family, name, partial(make, name))


def _size(name: str) -> tuple[int, int, str]:
    rank = next((place for place, mark in enumerate(_SMALL) if mark in name), len(_SMALL))
    return rank, int("".join(re.findall(r"\d+", name))[:6] or 0), name


def make(name: str, rows: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model for few classes, on the smallest images that it takes.

    Raises:
        NotByRuleError: it is too large.
    """
    model = _created(name)
    elements = sum(param.numel() for param in model.parameters())
    if elements > _MOST_ELEMENTS:
        raise NotByRuleError(f"{elements:,} elements are not small")
    settings: dict[str, Any] = vars(model).get("default_cfg") or {}
    channels, height, width = settings.get("input_size", (3, 224, 224))
    patches = getattr(model, "patch_embed", None)
    if getattr(patches, "img_size", None) is not None:
        height, width = patches.img_size  # type: ignore[union-attr]  # a pair
    elif not settings.get("fixed_input_size"):
        height = width = _smallest(model, channels, height)
    image = torch.randn(rows, channels, height, width, generator=torch.Generator().manual_seed(1))
    return _created(name), {"x": image}


def _created(name: str) -> nn.Module:
    import timm

    options: list[dict[str, Any]] = [{"img_size": 64}, {}]
    for own in options:
        torch.manual_seed(0)
        try:
            return timm.create_model(name, pretrained=False, num_classes=5, **own)
        except Exception:  # whatever a model says to an option that it does not take
            continue
    raise NotByRuleError("it cannot be made")


def _smallest(model: nn.Module, channels: int, usual: int) -> int:
    """A size of images that the model takes."""
    for size in (64, 96, 128, 160):
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(1, channels, size, size))
            return min(size, usual)
        except Exception:  # whatever a model says to other sizes
            continue
    return usual
