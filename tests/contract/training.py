"""Models, batches and the loop that scripts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import pyrannc

from .job import Data, Job

WIDTH = 6
CLASSES = 9
VOCABULARY = 20
TOKENS = 7
UNCOUNTED = -100


class Chain(nn.Module):
    """Linear layers, one after another."""

    def __init__(self, layers: int = 4, outputs: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers - 1))
        self.head = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class TokenChain(nn.Module):
    """Logits for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.chain = Chain(3, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.chain(self.embedding(tokens))  # type: ignore[no-any-return]


class OnPositive(nn.Module):
    """A layer with shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        chosen = x > 0
        y[chosen] = x[chosen] * 2
        return self.inner(y)  # type: ignore[no-any-return]


class Returns(nn.Module):
    """A model that returns ``result(outputs, *rest)``, as one with its loss inside."""

    def __init__(self, net: nn.Module, result: Callable[..., Any]) -> None:
        super().__init__()
        self.net = net
        self.result = result

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.result(self.net(x), *rest)


def pairs(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression."""
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def classes(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a classification."""
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def single(rows: int, generator: Generator) -> tuple[Tensor]:
    """Inputs alone."""
    return (torch.randn(rows, WIDTH, generator=generator),)


def padded(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Tokens and labels; rows have different numbers of counted labels, the first one none but one."""
    tokens = torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (rows,), generator=generator)
    lengths[0] = 1
    counted = torch.arange(TOKENS) < lengths[:, None]
    return tokens, torch.where(counted, tokens.flip(1), UNCOUNTED)


def chain_with_loss() -> Returns:
    """A chain that returns its loss."""
    return Returns(Chain(), F.mse_loss)


def sgd(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


def adam(net: nn.Module) -> Optimizer:
    return Adam(net.parameters(), lr=0.01)


def fit(
    job: Job,
    net: nn.Module,
    data: Data,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    criterion: Callable[..., Tensor] | None = None,
    optimizer: Callable[[Any], Optimizer] = sgd,
    **options: Any,
) -> None:
    """A few steps of a model that returns its loss; ``options`` are RaNNC's.

    ``loss`` takes it from what the model returns. With a ``criterion``, the model gets the first part of a batch, and
    the criterion what the model returns and the rest of the batch.
    """
    chosen = optimizer(net.parameters())
    model = job.wrap(net, chosen, **options)
    for batch in job.batches(data):
        chosen.zero_grad()
        if criterion is not None:
            criterion(model(batch[0]), *batch[1:]).backward()
        else:
            returned = model(*batch)
            value = returned if loss is None else loss(returned)
            job.same("loss", value)
            value.backward()
        job.gradients(model)
        chosen.step()
    job.state(model)


def clipped(model: nn.Module, most: float) -> Tensor:
    """Scales the gradients to a norm of at most ``most``; the norm before."""
    if isinstance(model, pyrannc.RaNNCModule):
        return model.clip_grad_norm(most)
    return nn.utils.clip_grad_norm_(model.parameters(), most)


def regression() -> Returns:
    """A model that returns the mean of its squared errors."""
    return Returns(Chain(), F.mse_loss)


def learn(job: Job, model: nn.Module, optimizer: Optimizer, data: Data = pairs, step: int = 0) -> Tensor:
    """One step of a model that returns its loss."""
    optimizer.zero_grad()
    loss: Tensor = model(*job.batch(data, step))
    job.same("loss", loss)
    loss.backward()
    job.gradients(model)
    optimizer.step()
    return loss


def learned(job: Job) -> tuple[Returns, nn.Module, Optimizer]:
    """A chain with its loss, as it is and as it is wrapped, and its Adam, after one step."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    return net, model, optimizer


def learn_around(job: Job, net: nn.Module, change: Callable[[Any], Any], steps: int = 2) -> None:
    """A step, ``change(model)``, and more steps."""
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    change(model)
    for step in range(1, 1 + steps):
        learn(job, model, optimizer, step=step)
    job.state(model)
