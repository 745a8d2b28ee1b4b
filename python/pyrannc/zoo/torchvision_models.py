"""Models of every task of torchvision."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .case import Case, NotByRuleError


def cases() -> Iterator[Case]:
    """All models but those that differ from another one in size alone."""
    from torchvision import models

    seen: set[str] = set()
    for name in sorted(models.list_models(), key=_size):
        builder = models.get_model_builder(name)
        task = builder.__module__.removeprefix("torchvision.models.")
        design = f"{task}.{_SIZE.sub('', name)}"
        if design not in seen:
            seen.add(design)
            yield Case("torchvision", task, name, partial(make, name))


_SIZE = re.compile(r"[0-9]+|_(tiny|small|base|large|huge|[bslx][0-9]*|[tmh](?=_|$)|[0-9]+[a-z]*).*")
_SIDE = 64
"""Pixels of an image's side, where a model takes any."""
_CLIP = (4, _SIDE, _SIDE)
"""Frames, height and width of the clips of a model that is made for one size of them."""
_LARGE = ("_s", "_small", "_m", "_b", "_base", "_l", "_large", "_h", "_huge")
"""Ends of names, in the order of size; none of them is the smallest."""


def _size(name: str) -> tuple[int, int, str]:
    digits = int("".join(re.findall(r"\d+", name))[:6] or 0)
    return digits, 1 + next((place for place, end in enumerate(_LARGE) if name.endswith(end)), -1), name


def make(name: str, rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model for few classes, and small images or clips; its dropout is as by default in any case.

    Raises:
        NotByRuleError: it is too large.
    """
    from torchvision import models

    torch.manual_seed(0)
    own = {"weights": None, "weights_backbone": None, "num_classes": 5, "aux_loss": False}
    builder = models.get_model_builder(name)
    known = inspect.signature(builder).parameters
    options = {key: value for key, value in own.items() if key in known or key == "num_classes"}
    if "raft" in name:
        options.pop("num_classes")
    task = builder.__module__.removeprefix("torchvision.models.")
    if task.startswith("detection") and "ssd" not in name:
        options |= {"min_size": _SIDE, "max_size": _SIDE}
        if "rcnn" in name:
            # Fewer than are taken: none is left out by chance.
            options |= {"rpn_pre_nms_top_n_train": 40, "rpn_post_nms_top_n_train": 20}
            options |= {"rpn_batch_size_per_image": 100_000, "box_batch_size_per_image": 100_000}
    if "init_weights" in known:
        options["init_weights"] = False
    with _small_clips():
        model = models.get_model(name, **options)
    elements = sum(param.numel() for param in model.parameters())
    if elements > 70_000_000:
        raise NotByRuleError(f"{elements:,} elements are not small")
    generator = torch.Generator().manual_seed(1)
    if task.startswith("detection"):
        images = [torch.rand(3, _SIDE, _SIDE, generator=generator) for _ in range(rows)]
        return model, {"images": images, "targets": [_target(name) for _ in range(rows)]}
    if task.startswith("optical_flow"):
        pair = [torch.rand(rows, 3, 128, 128, generator=generator) for _ in range(2)]
        return model, {"image1": pair[0], "image2": pair[1], "num_flow_updates": 2}
    first = next(iter(inspect.signature(model.forward).parameters))
    if task.startswith("video"):
        clip = _CLIP if "mvit" in name else (16, 224, 224) if "s3d" in name else (4, _SIDE // 2, _SIDE // 2)
        return model, {first: torch.rand(rows, 3, *clip, generator=generator)}
    size = 224 if "vit" in name or "maxvit" in name else 299 if "inception" in name else _SIDE
    return model, {first: torch.rand(rows, 3, size, size, generator=generator)}


@contextmanager
def _small_clips() -> Iterator[None]:
    """Builders of MViT set the size of clips themselves: 224 pixels take minutes for a step."""
    from torchvision.models.video import mvit

    own: type[nn.Module] = mvit.MViT

    def small(*args: Any, **kwargs: Any) -> nn.Module:
        made: nn.Module = own(*args, **{**kwargs, "temporal_size": _CLIP[0], "spatial_size": _CLIP[1:]})
        return made

    with patch.object(mvit, "MViT", small):
        yield


def _target(name: str) -> dict[str, torch.Tensor]:
    target = {"boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    if "mask" in name:
        target["masks"] = torch.ones(1, _SIDE, _SIDE, dtype=torch.uint8)
    if "keypoint" in name:
        target["keypoints"] = torch.ones(1, 17, 3)
    return target
