"""Models of the proof, small and in double precision, each with a batch and a criterion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 6
CLASSES = 5
VOCABULARY = 40
TOKENS = 8

Batch = tuple[tuple[Any, ...], dict[str, Any], Tensor]
"""Positional arguments, keyword arguments and the target of a criterion outside of the model."""


@dataclass(frozen=True)
class Recipe:
    """A model and what to feed it.

    Attributes:
        make: builds the model.
        batch: makes a batch of some rows.
        criterion: from outputs and target to the loss, a mean over rows.
        whole: keyword arguments that have no rows.
        batch_norm: results depend on which rows are computed together.
        row_dim: dimension of the rows in outputs.
        tolerance: by how much numbers may differ.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, Generator], Batch]
    criterion: Callable[[Any, Tensor], Tensor]
    whole: frozenset[str] = field(default=frozenset())
    batch_norm: bool = False
    row_dim: int = 0
    tolerance: float = 1e-10


def mean_rows(per_row: Tensor) -> Tensor:
    """The mean over dimension 0, zero for no rows."""
    return per_row.sum() / max(1, per_row.shape[0])


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return mean_rows(((output - target) ** 2).flatten(1).mean(1))


def itself(output: Tensor, target: Tensor) -> Tensor:
    return output


def dense_batch(rows: int, generator: Generator) -> Batch:
    x = torch.randn(rows, WIDTH, generator=generator)
    return (x,), {}, torch.randn(rows, WIDTH, generator=generator)


class Chain(nn.Module):
    """A chain of linear layers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class ForkJoin(nn.Module):
    """Two branches that meet twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        left, right = torch.sigmoid(self.left(x)), torch.relu(self.right(x))
        joined = torch.tanh(self.join(torch.cat([left, right], dim=1)))
        return self.last(joined + left * right)  # type: ignore[no-any-return]


class SharedInput(nn.Module):
    """The input is used at the begin, in the middle and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = torch.tanh(layer(y)) + 0.5 * x
        return y


class Tied(nn.Module):
    """First and last layer share a weight, and two in the middle share a whole layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.again = self.middle
        self.between = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.again(torch.tanh(self.between(x)))))  # type: ignore[no-any-return]


class Parametrized(nn.Module):
    """Weights that are made of parameters and buffers, some of which are used as they are as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        parametrizations.spectral_norm(self.layers[0])
        parametrizations.weight_norm(self.layers[2])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("smoothed", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide, old = torch.exp(self.scale), self.smoothed
        self.calls += 1
        self.smoothed = 0.9 * old + 0.1 * self.scale.detach()
        x = x * self.smoothed + old / self.calls
        for layer in self.layers:
            x = torch.tanh(layer(x) * wide) * self.scale
        tied = self.last.weight + self.last.weight.t()
        return F.linear(self.last(x), tied) + torch.zeros(x.shape[0])[:, None]


class Penalized(nn.Module):
    """The loss has a penalty on weights, which is a result by itself too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Parametrized()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        penalty = 0.1 * self.inner.scale.square().sum() + self.inner.last.weight.abs().mean()
        return {"loss": F.mse_loss(self.inner(x), y) + penalty, "penalty": penalty}


class Unled(nn.Module):
    """Views that are made while autograd is off, of a parameter, of what a layer gives and of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        with torch.no_grad():
            row, halves, shifted = self.table.t(), first.chunk(2, -1), x[:, :1]
        for layer in self.layers[1:]:
            first = torch.tanh(layer(first)) + row * self.table.mean()
        return first + torch.cat(halves, -1) + shifted


class Skip(nn.Module):
    """The first layer's result is used at the very end, beyond other Stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        early = torch.tanh(self.layers[0](x))
        x = early
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * early


class ConvNet(nn.Module):
    """Convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for inputs in (3, 4, 4)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Integer tokens in; linear layers work on all tokens of the batch as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).view(-1, WIDTH)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).view(tokens.shape[0], tokens.shape[1], CLASSES).mean(1)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Gradients of results of layers go through hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda grad: grad * 1.5)
            x = torch.tanh(x)
        return x


class LossInside(nn.Module):
    """Two inputs; the loss is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.chain(x), y)


class DictOutput(nn.Module):
    """Several outputs from several depths, one of them without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first))))
        last = self.layers[4](torch.tanh(self.layers[3](second)))
        return {"last": last, "depths": [first, second], "chosen": last.argmax(1), "input": x, "note": "text"}


def dict_criterion(output: dict[str, Any], target: Tensor) -> Tensor:
    first, _ = output["depths"]
    return squared_error(output["last"], target) + mean_rows(first.square().sum(1))


class LossAmongOutputs(nn.Module):
    """A dict with the loss and batch-shaped outputs, as many real models return."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(5)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        output = self.chain(x)
        return {"output": output, "loss": F.mse_loss(output, y), "mean": output.detach().mean(0)}


class TwoScalars(nn.Module):
    """Two averages that the user adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain(5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = self.chain(x)
        return F.mse_loss(output, y), output.square().mean()


class Keywords(nn.Module):
    """Keyword arguments, some left out, one without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        *,
        shift: Tensor | None = None,
        scale: Tensor,
        missing: Tensor | None = None,
        twice: bool = False,
    ) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * scale)
        if shift is not None:
            x = x + shift
        if missing is not None:
            x = x * missing
        return 2 * x if twice else x


def keyword_batch(rows: int, generator: Generator) -> Batch:
    (x,), _, target = dense_batch(rows, generator)
    kwargs = {"shift": torch.randn(rows, 1, generator=generator), "scale": torch.tensor(0.7), "twice": True}
    return (x,), kwargs, target


class InPlace(nn.Module):
    """Works in place on its input and on results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        for layer in self.layers:
            y = layer(x).add_(0.1)
            y[:, 0] = 0.5
            x = torch.tanh(y)
        return x


class TransposedOutput(nn.Module):
    """Rows in dimension 1 of the output, as of recurrent networks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def transposed_batch(rows: int, generator: Generator) -> Batch:
    x = torch.randn(rows, 3, WIDTH, generator=generator)
    return (x,), {}, torch.randn(rows, 3, WIDTH, generator=generator)


def transposed_error(output: Tensor, target: Tensor) -> Tensor:
    return squared_error(output.transpose(0, 1), target)


class Frozen(nn.Module):
    """A frozen layer and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.layers[2].weight.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Dropout(nn.Module):
    """Dropout between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return x


def image_batch(size: int) -> Callable[[int, Generator], Batch]:
    def batch(rows: int, generator: Generator) -> Batch:
        images = torch.randn(rows, 3, size, size, generator=generator)
        return (images,), {}, torch.randint(0, CLASSES, (rows,), generator=generator)

    return batch


def token_batch(rows: int, generator: Generator) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    return (tokens,), {}, torch.randint(0, CLASSES, (rows,), generator=generator)


def pair_batch(rows: int, generator: Generator) -> Batch:
    (x,), _, target = dense_batch(rows, generator)
    return (x, target), {}, target


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return mean_rows(F.cross_entropy(logits, target, reduction="none"))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForPreTraining(config)


def bert_batch(rows: int, generator: Generator) -> Batch:
    """Two masked tokens in every row, so that a mean over masked tokens is a mean over rows."""
    tokens = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    labels = torch.full_like(tokens, -100)
    for row in range(rows):
        masked = torch.randperm(TOKENS - 2, generator=generator)[:2]
        labels[row, masked] = tokens[row, masked]
    attended = torch.ones_like(tokens)
    attended[::2, TOKENS - 2 :] = 0
    kwargs = {
        "input_ids": tokens,
        "attention_mask": attended,
        "token_type_ids": (torch.arange(TOKENS) >= TOKENS // 2).long().repeat(rows, 1),
        "labels": labels,
        "next_sentence_label": torch.randint(0, 2, (rows,), generator=generator),
    }
    return (), kwargs, tokens


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=8,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLMLoss",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def gpt2_batch(rows: int, generator: Generator) -> Batch:
    (tokens,), _, _ = token_batch(rows, generator)
    return (), {"input_ids": tokens}, tokens


def gpt2_labels_batch(rows: int, generator: Generator) -> Batch:
    (tokens,), _, _ = token_batch(rows, generator)
    return (), {"input_ids": tokens, "labels": tokens}, tokens


def next_token_error(output: Any, target: Tensor) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    errors = F.cross_entropy(logits, target[:, 1:].flatten(), reduction="none")
    return mean_rows(errors.view(-1, TOKENS - 1).mean(1))


def its_loss(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def resnet50() -> nn.Module:
    from torchvision.models import resnet50

    # All layers, but few channels inside the blocks.
    return resnet50(num_classes=CLASSES, width_per_group=4)


RECIPES = {
    "chain": Recipe(Chain, dense_batch, squared_error),
    "fork_join": Recipe(ForkJoin, dense_batch, squared_error),
    "shared_input": Recipe(SharedInput, dense_batch, squared_error),
    "hooked": Recipe(Hooked, dense_batch, squared_error),
    "tied": Recipe(Tied, dense_batch, squared_error),
    "parametrized": Recipe(Parametrized, dense_batch, squared_error),
    "penalized": Recipe(Penalized, pair_batch, its_loss),
    "unled": Recipe(Unled, dense_batch, squared_error),
    "skip": Recipe(Skip, dense_batch, squared_error),
    "conv_net": Recipe(ConvNet, image_batch(5), cross_entropy, batch_norm=True),
    "embedding": Recipe(Embedding, token_batch, cross_entropy),
    "loss_inside": Recipe(LossInside, pair_batch, itself),
    "dict_output": Recipe(DictOutput, dense_batch, dict_criterion),
    "loss_among_outputs": Recipe(LossAmongOutputs, pair_batch, its_loss),
    "two_scalars": Recipe(TwoScalars, pair_batch, lambda output, target: output[0] + 0.25 * output[1]),
    "keywords": Recipe(Keywords, keyword_batch, squared_error, whole=frozenset({"scale"})),
    "in_place": Recipe(InPlace, dense_batch, squared_error),
    "transposed_output": Recipe(TransposedOutput, transposed_batch, transposed_error, row_dim=1),
    "frozen": Recipe(Frozen, dense_batch, squared_error),
    "dropout": Recipe(Dropout, dense_batch, squared_error),
    "bert": Recipe(bert, bert_batch, its_loss),
    "gpt2": Recipe(gpt2, gpt2_batch, next_token_error),
    # The class turns its logits into single precision for its loss.
    "gpt2_labels": Recipe(gpt2, gpt2_labels_batch, its_loss, tolerance=1e-6),
    "resnet50": Recipe(resnet50, image_batch(64), cross_entropy, batch_norm=True),
}
