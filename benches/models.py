"""Models and batches that the benchmarks train, built from configurations (no weights are loaded).

Under ``torch.device("meta")`` a model takes no memory; it can be captured, but not trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import Bottleneck
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

IGNORED = -100
_BERT_VOCABULARY = 30522
_GPT2_VOCABULARY = 50257
_T5_VOCABULARY = 32128
_IMAGE_CLASSES = 1000
_VOXEL_CLASSES = 4
_BOTTLENECKS = (3, 8, 36, 3)
_MOST_VOXEL_CHANNELS = 320

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """A family of models.

    Attributes:
        sizes: the names of its sizes, in the order in which they are given.
        make: a model of these sizes.
        batch: a batch by argument name: of so many rows, drawn from this generator, for a model of these sizes.
    """

    sizes: tuple[str, ...]
    make: Callable[..., nn.Module]
    batch: Callable[..., Batch]


def make_model(name: str, sizes: list[int], seed: int, dropout: float = 0.0) -> nn.Module:
    """A model of one of the families in :data:`MODELS`, with weights drawn from ``seed``.

    Args:
        dropout: probability, wherever a transformer drops.
    """
    torch.manual_seed(seed)
    options = {"dropout": dropout} if dropout else {}
    return MODELS[name].make(*sizes, **options)


def make_batch(name: str, rows: int, sizes: list[int], seed: int, rank: int) -> Batch:
    """A rank's batch of ``rows`` rows: tensors by argument name."""
    return MODELS[name].batch(rows, Generator().manual_seed(seed * 1000 + rank), *sizes)


def loss_of(output: Tensor | object) -> Tensor:
    """The scalar to differentiate."""
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else output.square().mean()
    loss = output.loss  # type: ignore[attr-defined]  # Hugging Face's outputs have it
    assert isinstance(loss, Tensor)
    return loss


def loss_is_inside(name: str) -> bool:
    """True when the model returns its loss."""
    return name != "chain"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments ``model`` and ``--sizes``."""
    parser.add_argument("model", choices=list(MODELS))
    families = "; ".join(f"{name}: {' '.join(recipe.sizes).upper()}" for name, recipe in MODELS.items())
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help=families)


class Chain(nn.Module):
    """RaNNC's tutorial: ``layers`` linear layers of ``hidden`` features."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class WideResNet(nn.Module):
    """ResNet-152 with ``width`` times as many channels everywhere (Kolesnikov et al., "Big Transfer", ECCV 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        channels = 64 * width
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        for stage, count in enumerate(_BOTTLENECKS):
            planes = 64 * width * 2**stage
            for index in range(count):
                stride = 2 if stage and index == 0 else 1
                blocks.append(_bottleneck(channels, planes, stride))
                channels = planes * Bottleneck.expansion
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, _IMAGE_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return functional.cross_entropy(self.classifier(features), labels)


def _bottleneck(channels: int, planes: int, stride: int) -> nn.Module:
    wide = planes * Bottleneck.expansion
    shortcut = None
    if stride != 1 or channels != wide:
        shortcut = nn.Sequential(nn.Conv2d(channels, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide))
    return Bottleneck(channels, planes, stride, shortcut)


class UNet3d(nn.Module):
    """3D U-Net (Çiçek et al., MICCAI 2016) with the normalisation and strides of nnU-Net.

    Args:
        base: channels at full resolution; they double with every level, up to 320.
        levels: resolutions, each half of the one before.
    """

    def __init__(self, base: int, levels: int) -> None:
        super().__init__()
        channels = [min(base * 2**level, _MOST_VOXEL_CHANNELS) for level in range(levels)]
        self.down = nn.ModuleList(
            _convolutions(1 if level == 0 else channels[level - 1], channels[level], stride=1 if level == 0 else 2)
            for level in range(levels)
        )
        self.enlarge = nn.ModuleList(
            nn.ConvTranspose3d(channels[level + 1], channels[level], 2, stride=2) for level in range(levels - 1)
        )
        self.up = nn.ModuleList(
            _convolutions(2 * channels[level], channels[level], stride=1) for level in range(levels - 1)
        )
        self.head = nn.Conv3d(base, _VOXEL_CLASSES, 1)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            volume = down(volume)
            skips.append(volume)
        skips.pop()
        for enlarge, up in zip(reversed(self.enlarge), reversed(self.up), strict=True):
            volume = up(torch.cat([enlarge(volume), skips.pop()], dim=1))
        return functional.cross_entropy(self.head(volume), labels)


def _convolutions(channels: int, wide: int, stride: int) -> nn.Module:
    def one(into: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv3d(into, wide, 3, stride=stride, padding=1)
        return [convolution, nn.InstanceNorm3d(wide, affine=True), nn.LeakyReLU(0.01, inplace=True)]

    return nn.Sequential(*one(channels, stride), *one(wide, 1))


def _bert(layers: int, hidden: int, sequence: int, dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=_BERT_VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=max(1, hidden // 64),
        intermediate_size=4 * hidden,
        max_position_embeddings=sequence,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForPreTraining(config)


def _bert_batch(rows: int, generator: Generator, layers: int, hidden: int, sequence: int) -> Batch:
    """Every row has as many masked tokens."""
    tokens = _tokens(rows, sequence, _BERT_VOCABULARY, generator)
    places = torch.rand(rows, sequence, generator=generator).topk(max(1, sequence * 15 // 100), dim=1).indices
    return {
        "input_ids": tokens.scatter(1, places, _BERT_VOCABULARY - 1),
        "attention_mask": torch.ones_like(tokens),
        "labels": torch.full_like(tokens, IGNORED).scatter(1, places, tokens.gather(1, places)),
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
    }


def _gpt2(layers: int, hidden: int, sequence: int, dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=_GPT2_VOCABULARY,
        n_layer=layers,
        n_embd=hidden,
        n_head=max(1, hidden // 64),
        n_positions=sequence,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _gpt2_batch(rows: int, generator: Generator, layers: int, hidden: int, sequence: int) -> Batch:
    tokens = _tokens(rows, sequence, _GPT2_VOCABULARY, generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _t5(
    layers: int, hidden: int, feed_forward: int, heads: int, head_size: int, sequence: int, dropout: float = 0.0
) -> nn.Module:
    config = T5Config(
        vocab_size=_T5_VOCABULARY,
        num_layers=layers,
        d_model=hidden,
        d_ff=feed_forward,
        num_heads=heads,
        d_kv=head_size,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config)


def _t5_batch(rows: int, generator: Generator, *sizes: int) -> Batch:
    sequence = sizes[-1]
    return {
        "input_ids": _tokens(rows, sequence, _T5_VOCABULARY, generator),
        "labels": _tokens(rows, sequence, _T5_VOCABULARY, generator),
    }


def _resnet_batch(rows: int, generator: Generator, width: int, pixels: int) -> Batch:
    return {
        "images": torch.randn(rows, 3, pixels, pixels, generator=generator),
        "labels": torch.randint(0, _IMAGE_CLASSES, (rows,), generator=generator),
    }


def _unet_batch(rows: int, generator: Generator, base: int, levels: int, *extents: int) -> Batch:
    return {
        "volume": torch.randn(rows, 1, *extents, generator=generator),
        "labels": torch.randint(0, _VOXEL_CLASSES, (rows, *extents), generator=generator),
    }


def _chain_batch(rows: int, generator: Generator, hidden: int, layers: int) -> Batch:
    return {"x": torch.randn(rows, hidden, generator=generator)}


def _tokens(rows: int, sequence: int, vocabulary: int, generator: Generator) -> Tensor:
    return torch.randint(1, vocabulary, (rows, sequence), generator=generator)


MODELS = {
    "chain": Recipe(("hidden", "layers"), Chain, _chain_batch),
    "bert": Recipe(("layers", "hidden", "sequence"), _bert, _bert_batch),
    "gpt2": Recipe(("layers", "hidden", "sequence"), _gpt2, _gpt2_batch),
    "t5": Recipe(("layers", "hidden", "feed_forward", "heads", "head_size", "sequence"), _t5, _t5_batch),
    "resnet152": Recipe(("width", "pixels"), lambda width, pixels: WideResNet(width), _resnet_batch),
    "unet3d": Recipe(
        ("base", "levels", "depth", "height", "width"), lambda base, levels, *extents: UNet3d(base, levels), _unet_batch
    ),
}
