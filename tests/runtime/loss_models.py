"""Models whose losses and statistics are those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

WIDTH = 6
CLASSES = 5
TOKENS = 3
IGNORED = -100

Arguments = dict[str, Tensor]


class Net(nn.Module):
    """Layers, then what ``head`` makes of their result and the other arguments."""

    def __init__(self, head: Callable[..., Any], width: int = WIDTH, **weights: Tensor) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, width)
        self.head = head
        for name, tensor in weights.items():
            if tensor.requires_grad:
                self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
            else:
                self.register_buffer(name, tensor.clone())

    def forward(self, x: Tensor, **others: Tensor) -> Any:
        y = self.last(torch.tanh(self.second(torch.relu(self.first(x)))))
        return self.head(self, x, y, **others)


@dataclass(frozen=True)
class Recipe:
    """How to make a model and the arguments of a call.

    Attributes:
        criterion: from outputs and arguments for the same rows to a loss; without one the output or its first item.
        inside: backwards run inside the call.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, Generator], Arguments]
    criterion: Callable[[Any, Arguments], Tensor] | None = None
    inside: bool = False

    def loss(self, output: Any, arguments: Arguments) -> Tensor:
        if self.criterion is not None:
            return self.criterion(output, arguments)
        return output if isinstance(output, Tensor) else output[0]


def _rows(rows: int, generator: Generator) -> Arguments:
    return {"x": torch.randn(rows, WIDTH, generator=generator)}


def _with_target(rows: int, generator: Generator) -> Arguments:
    return {**_rows(rows, generator), "target": torch.randn(rows, WIDTH, generator=generator)}


def _with_tokens(rows: int, generator: Generator) -> Arguments:
    x = torch.randn(rows, TOKENS, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (rows, TOKENS), generator=generator)
    ignored = torch.rand(rows, TOKENS, generator=generator) < 0.5
    ignored[0, 0] = False
    return {"x": x, "labels": torch.where(ignored, IGNORED, labels)}


def _with_count(rows: int, generator: Generator) -> Arguments:
    arguments = _with_tokens(rows, generator)
    return {**arguments, "count": (arguments["labels"] != IGNORED).sum()}


def _flat(y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return y.view(-1, CLASSES), labels.view(-1)


def _weights() -> Tensor:
    return torch.linspace(0.5, 2.0, CLASSES)


def mse_sum(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target, reduction="sum")


def token_mean(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(y, labels))


def token_mean_and_scores(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hits = ((y.argmax(-1) == labels) & (labels != IGNORED)).sum()
    return F.cross_entropy(*_flat(y, labels)), y, hits


def weighted(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(y, labels), weight=net.weight)


def smoothed(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(y, labels), weight=net.weight, label_smoothing=0.1)


def nll(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(y, -1).transpose(1, 2), labels)


def masked_mean(net: Any, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).to(y.dtype)
    return (y.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def counted_outside(net: Any, x: Tensor, y: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    return F.cross_entropy(*_flat(y, labels), reduction="sum") / count


def per_row(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum() / x.shape[0]


def two_terms(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target) + 0.1 * y.abs().sum() - y[:, 0].mean()


def product_of_means(net: Any, x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    share = y.softmax(-1).mean(0)
    return F.mse_loss(y, target) + (share * share).sum() * 0.5, share


def uncertainty(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y, target) * torch.exp(-net.log_var) + net.log_var


def centered(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return y - y.mean(0)


def contrastive(net: Any, x: Tensor, y: Tensor) -> Tensor:
    y = F.normalize(y, dim=-1)
    scores = y @ F.normalize(x, dim=-1).t() * net.scale.exp()
    return F.cross_entropy(scores, torch.arange(x.shape[0]))


def normalised(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    mean = y.mean(0)
    var = (y - mean).square().mean(0)
    with torch.no_grad():
        net.running.mul_(0.9).add_(mean, alpha=0.1)
    y = (y - mean) / (var + 1e-3).sqrt() * net.scale
    return F.mse_loss(net.second(torch.relu(net.first(y)))[:, :WIDTH], target)


def body_and_tail_share(net: Any, x: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(F.linear(y - y.mean(0), net.last.weight[:, :WIDTH]), target)


def changed_after(net: Any, x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    z = y * 2
    rest = z - z.mean(0)
    z += 1
    return F.mse_loss(rest, target), z


def _squares(output: Tensor, arguments: Arguments) -> Tensor:
    return output.square().mean() + output.sin().mean()


def _net(head: Callable[..., Any], width: int = WIDTH, **weights: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(head, width, **{name: make() for name, make in weights.items()})


def _scalar() -> Tensor:
    return torch.tensor(0.3, requires_grad=True)


RECIPES: dict[str, Recipe] = {
    "mse_sum": Recipe(_net(mse_sum), _with_target, inside=True),
    "token_mean": Recipe(_net(token_mean, CLASSES), _with_tokens, inside=True),
    "token_mean_and_scores": Recipe(_net(token_mean_and_scores, CLASSES), _with_tokens, inside=True),
    "weighted": Recipe(_net(weighted, CLASSES, weight=_weights), _with_tokens, inside=True),
    "smoothed": Recipe(_net(smoothed, CLASSES, weight=_weights), _with_tokens, inside=True),
    "nll": Recipe(_net(nll, CLASSES), _with_tokens, inside=True),
    "masked_mean": Recipe(_net(masked_mean, CLASSES), _with_tokens, inside=True),
    "counted_outside": Recipe(_net(counted_outside, CLASSES), _with_count, inside=True),
    "per_row": Recipe(_net(per_row), _with_target, inside=True),
    "two_terms": Recipe(_net(two_terms), _with_target, inside=True),
    "product_of_means": Recipe(_net(product_of_means), _with_target),
    "uncertainty": Recipe(_net(uncertainty, log_var=_scalar), _with_target),
    "centered": Recipe(_net(centered), _rows, criterion=_squares),
    "contrastive": Recipe(_net(contrastive, scale=_scalar), _rows),
    "normalised": Recipe(
        _net(normalised, scale=lambda: torch.ones(WIDTH, requires_grad=True), running=lambda: torch.zeros(WIDTH)),
        _with_target,
    ),
    "body_and_tail_share": Recipe(_net(body_and_tail_share), _with_target),
    "changed_after": Recipe(_net(changed_after), _with_target),
}
