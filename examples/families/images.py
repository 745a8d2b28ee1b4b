"""Classifiers of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from .family import Family, Row

_BLOCKS = {14: [1, 1, 1, 1], 50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}
"""Blocks of three convolutions at each resolution, by the number of layers."""


@dataclass(frozen=True)
class _Classifier(Family):
    pixels: int = 32
    classes: int = 10

    def row(self, generator: Generator) -> Row:
        return {
            "pixel_values": torch.randn(3, self.pixels, self.pixels, generator=generator),
            "labels": torch.randint(self.classes, (), generator=generator),
        }


@dataclass(frozen=True)
class ResNet(_Classifier):
    """ResNet (He et al., CVPR 2016) of 14, 50, 101 or 152 layers, with ``width`` times as many channels everywhere."""

    layers: int = 14
    width: int = 1

    def __post_init__(self) -> None:
        if self.layers not in _BLOCKS:
            raise ValueError(f"a ResNet has {', '.join(map(str, _BLOCKS))} layers, not {self.layers}")

    def model(self) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        return ResNetForImageClassification(
            ResNetConfig(
                depths=_BLOCKS[self.layers],
                embedding_size=64 * self.width,
                hidden_sizes=[256 * 2**level * self.width for level in range(4)],
                num_labels=self.classes,
                problem_type="single_label_classification",
            )
        )


@dataclass(frozen=True)
class ViT(_Classifier):
    """Vision Transformer (Dosovitskiy et al., ICLR 2021)."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    patch: int = 8

    def model(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        return ViTForImageClassification(
            ViTConfig(
                num_hidden_layers=self.layers,
                hidden_size=self.hidden,
                num_attention_heads=self.heads,
                intermediate_size=4 * self.hidden,
                image_size=self.pixels,
                patch_size=self.patch,
                num_labels=self.classes,
                problem_type="single_label_classification",
            )
        )
