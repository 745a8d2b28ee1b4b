"""What changes between calls: parameters, hooks, attributes, state in Python, chance outside of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.training import Chain, Returns, learn, pairs


def _trained(job: Job, net: nn.Module, change: Any, steps: int = 2) -> None:
    """A step, ``change(model)``, and more steps."""
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    change(model)
    for step in range(1, 1 + steps):
        learn(job, model, optimizer, step=step)
    job.state(model)


def _regression() -> Returns:
    return Returns(Chain(), F.mse_loss)


# Parameters


@equal()
def frozen_later(job: Job) -> None:
    """`requires_grad_(False)` on a layer after some steps."""
    net = _regression()
    _trained(job, net, lambda model: net.net.layers[1].requires_grad_(False))


@equal()
def data_changed_in_place(job: Job) -> None:
    """`param.data.mul_()`, as weight clipping does, after each step."""

    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.data.clamp_(-0.2, 0.2)

    _trained(job, _regression(), change)


# Hooks


@equal()
def forward_hook_returns(job: Job) -> None:
    """A forward hook that changes what a layer returns, registered before the first call."""
    net = _regression()
    net.net.layers[0].register_forward_hook(lambda module, args, out: out * 0.5)
    _trained(job, net, lambda model: None)


@refused("CaptureError|RaNNCError", "hook", instead="put an `autograd.Function` into the model")
def backward_hook(job: Job) -> None:
    """A module has a backward hook (`register_full_backward_hook`)."""
    net = _regression()
    net.net.layers[0].register_full_backward_hook(lambda module, grads, outs: None)
    _trained(job, net, lambda model: None)


# Attributes


@equal()
def buffer_set_between_calls(job: Job) -> None:
    """The script changes a buffer in place between calls, as a schedule of a temperature does."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature

    net = Net()
    _trained(job, Returns(net, F.mse_loss), lambda model: net.temperature.fill_(2.0))


# Chance and time outside of torch


# Arguments


@equal()
def scalar_tensor(job: Job) -> None:
    """A 0-dim tensor among the arguments changes from step to step, the same on all ranks."""
    net = Returns(Chain(), lambda y, target, scale: F.mse_loss(y, target) * scale)
    model = job.wrap(net)
    for step in range(3):
        x, target = job.batch(pairs, step)
        loss = model(x, target, torch.tensor(1.0 + step))
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


@equal()
def number_argument(job: Job) -> None:
    """A Python number among the arguments changes from step to step."""
    model = job.wrap(Returns(Chain(), lambda y, target, scale: F.mse_loss(y, target) * scale))
    for step in range(3):
        x, target = job.batch(pairs, step)
        loss = model(x, target, 1.0 + step)
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


def _if_large(y: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(y if bool((target > 100).all()) else -y, target)


@warned("asks its data questions", instead="use `torch.where`; another answer is an error")
def answer_stays(job: Job) -> None:
    """The model asks its data a question, and every batch gives the same answer."""
    _trained(job, Returns(Chain(), _if_large), lambda model: None)
