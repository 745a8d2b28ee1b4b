"""Families of models, unchanged as their libraries define them, and their usual sizes by name."""

from __future__ import annotations

from .causal import Gpt2, Llama, Mamba, Mixtral
from .electra import Electra
from .family import Family, Row
from .images import ResNet, ViT
from .masked import Albert, Bert, Deberta
from .sequences import T5, Whisper
from .unet3d import UNet3d

__all__ = ["FULL", "TINY", "Family", "Row"]

TINY: dict[str, Family] = {
    "bert": Bert(),
    "t5": T5(),
    "resnet": ResNet(),
    "unet3d": UNet3d(),
    "albert": Albert(),
    "electra": Electra(),
    "deberta": Deberta(),
    "gpt2": Gpt2(),
    "llama": Llama(),
    "mixtral": Mixtral(),
    "vit": ViT(),
    "whisper": Whisper(),
    "mamba": Mamba(),
}
"""One of each family, small enough for a laptop."""

_ENGLISH = 30522
"""Tokens of BERT's vocabulary."""

FULL: dict[str, Family] = {
    "bert-large": Bert(layers=24, hidden=1024, heads=16, sequence=512, vocabulary=_ENGLISH),
    "bert-256": Bert(layers=256, hidden=1024, heads=16, sequence=512, vocabulary=_ENGLISH),
    "bert-4.9b": Bert(layers=96, hidden=2048, heads=32, sequence=512, vocabulary=_ENGLISH),
    "bert-100b": Bert(layers=80, hidden=10240, heads=80, sequence=512, vocabulary=_ENGLISH),
    "t5-3b": T5(layers=24, hidden=1024, heads=32, head_size=128, feed_forward=16384, sequence=512, vocabulary=32128),
    "resnet-50": ResNet(layers=50, pixels=224, classes=1000),
    "resnet-101": ResNet(layers=101, pixels=224, classes=1000),
    "resnet-152": ResNet(layers=152, pixels=224, classes=1000),
    "resnet-152x8": ResNet(layers=152, width=8, pixels=224, classes=1000),
    "unet3d-mlperf": UNet3d(channels=32, levels=6, depth=160, height=288, width=288),
    "albert-xxlarge": Albert(layers=12, hidden=4096, heads=64, embedding=128, sequence=512, vocabulary=30000),
    "electra-large": Electra(layers=24, hidden=1024, heads=16, embedding=1024, sequence=512, vocabulary=_ENGLISH),
    "deberta-xxlarge": Deberta(layers=48, hidden=1536, heads=24, sequence=512, vocabulary=128100),
    "gpt2-xl": Gpt2(layers=48, hidden=1600, heads=25, sequence=1024, vocabulary=50257),
    "llama-8b": Llama(
        layers=32, hidden=4096, heads=32, key_heads=8, feed_forward=14336, sequence=4096, vocabulary=128256
    ),
    "mixtral-8x7b": Mixtral(
        layers=32,
        hidden=4096,
        heads=32,
        key_heads=8,
        feed_forward=14336,
        experts=8,
        sequence=4096,
        vocabulary=32000,
    ),
    "vit-huge": ViT(layers=32, hidden=1280, heads=16, patch=14, pixels=224, classes=1000),
    "whisper-large": Whisper(
        layers=32, hidden=1280, heads=20, bins=128, positions=1500, sequence=448, vocabulary=51866
    ),
    "mamba-2.8b": Mamba(layers=64, hidden=2560, sequence=256, vocabulary=50280),
}
"""The sizes that have become known."""
