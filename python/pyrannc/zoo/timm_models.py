"""The smallest model of every family of timm."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from .case import Case, NotByRuleError

_MOST_ELEMENTS = 60_000_000
_SIDES = (64, 96, 128, 160, 224)
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


def make(name: str, rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model for few classes, on the smallest images that it takes; its dropout is as by default in any case.

    Raises:
        NotByRuleError: it is too large, or runs on none.
    """
    own, size = _rung(name)
    image = torch.randn(rows, *size, generator=torch.Generator().manual_seed(1))
    return _created(name, own), {"x": image}


_OPTIONS: tuple[dict[str, Any], ...] = ({"img_size": 64}, {}, {"img_size": 64, "depth": 4}, {"depth": 4})


@cache
def _rung(name: str) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """The first options, and the smallest size of images, with which the model runs."""
    why = "it cannot be made"
    for own in _OPTIONS:
        try:
            model = _created(name, own)
        except Exception:  # whatever a model says to an option that it does not take
            continue
        elements = sum(param.numel() for param in model.parameters())
        if elements > _MOST_ELEMENTS:
            why = f"{elements:,} elements are not small"
            continue
        settings: dict[str, Any] = vars(model).get("default_cfg") or {}
        channels, *usual = settings.get("input_size", (3, 224, 224))
        for height, width in (*((side, side) for side in _SIDES if side <= min(usual)), tuple(usual)):
            try:
                with torch.no_grad():
                    model.eval()(torch.zeros(1, channels, height, width))
                return own, (channels, height, width)
            except Exception as error:  # whatever a model says to other sizes
                why = f"{type(error).__name__}: {error}"
    raise NotByRuleError(why)


def _created(name: str, own: dict[str, Any]) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, num_classes=5, **own)
