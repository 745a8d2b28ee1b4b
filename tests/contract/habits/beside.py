"""Layers and tensors of the script before and behind a model, in one optimizer with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import REPLICAS, STAGES, Setting
from tests.contract.training import WIDTH, Chain, Returns, pairs


class _Prompted(Chain):
    def forward(self, x: Tensor, prompt: Tensor | None = None) -> Tensor:
        return super().forward(x if prompt is None else x * prompt)


def _between(job: Job, net: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor], *others: Tensor) -> None:
    """Trains a model between layers or beside tensors that are not its own, in one optimizer."""
    optimizer = SGD([*net.parameters(), *others], lr=0.1)
    model = job.wrap(net, optimizer)
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        loss(model, x, target).backward()
        job.same("gradients", [other.grad for other in others])
        job.gradients(model)
        optimizer.step()
    job.same("others", list(others))
    job.state(model)


@equal()
def layers_before_and_after_the_model(job: Job) -> None:
    """What the model takes comes from layers outside of it, and what it returns goes through others; one optimizer."""
    torch.manual_seed(3)
    stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(head(model(stem(x))), target, reduction="sum") / max(1, len(x))

    _between(job, Chain(), loss, *stem.parameters(), *head.parameters())


@equal()
def layers_before_a_model_with_its_loss(job: Job) -> None:
    """What a model that returns its loss takes comes from layers outside of it, which the script decays."""
    torch.manual_seed(3)
    stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return model(stem(x), target) + stem[0].weight.square().sum()  # type: ignore[no-any-return]

    _between(job, Returns(Chain(), F.mse_loss), loss, *stem.parameters())


@equal((REPLICAS, STAGES, Setting((7, 1), 2, 4)))
def learned_prompt(job: Job) -> None:
    """A tensor that is the same for all rows goes into the model, and is in the optimizer."""
    prompt = torch.linspace(0.5, 1.5, WIDTH).requires_grad_()

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(x, prompt * 2), target, reduction="sum") / max(1, len(x))

    _between(job, _Prompted(), loss, prompt)


@refused("RaNNCError", "one module", "detach", instead="one module of both, or `detach()`")
def layers_before_the_model_and_gradients_of_inputs(job: Job) -> None:
    """What layers outside of the model make of an input that requires gradients goes into it."""
    stem = nn.Linear(WIDTH, WIDTH)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(stem(x.requires_grad_())), target)

    _between(job, Chain(), loss, *stem.parameters())
