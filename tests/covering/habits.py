"""Some twenty habits of scripts that any row of the array can train with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from .loop import Loop, evaluated
from .models import (
    Centred,
    Chain,
    Checkpointed,
    Convolved,
    Counting,
    Language,
    Normed,
    Residual,
    tokens,
)

Start = Callable[..., Loop]
"""Makes a loop of a model, its data and its optimizer."""

Habit = Callable[[Start], None]
HABITS: dict[str, Habit] = {}


def habit(script: Habit) -> Habit:
    HABITS[script.__name__] = script
    return script


def adam(params: Any) -> Optimizer:
    # Without so great an eps, Adam makes steps of what is rounding alone.
    return Adam(params, lr=0.02, eps=0.1)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.02, eps=0.1, weight_decay=0.1)


# Models


@habit
def chain(start: Start) -> None:
    start(Chain()).train()


@habit
def attention(start: Start) -> None:
    start(Language(), tokens, adamw).train()


@habit
def tied_weights(start: Start) -> None:
    start(Language(tied=True), tokens).train()


@habit
def norms_and_residuals(start: Start) -> None:
    start(Residual(), make_optimizer=adam).train()


@habit
def convolutions(start: Start) -> None:
    start(Convolved()).train()


@habit
def buffers(start: Start) -> None:
    start(Counting()).train()


@habit
def checkpointed(start: Start) -> None:
    start(Checkpointed()).train()


@habit
def rows_that_mix(start: Start) -> None:
    start(Centred()).train()


@habit
def weight_norm(start: Start) -> None:
    start(Normed()).train()


@habit
def frozen_layer(start: Start) -> None:
    net = Chain()
    net.layers[1].requires_grad_(False)
    start(net).train()


# Optimizers


@habit
def whole_parameters_for_the_optimizer(start: Start) -> None:
    start(Residual(), make_optimizer=partial(Adafactor, lr=0.02)).train()


@habit
def groups_and_a_schedule(start: Start) -> None:
    def grouped(params: list[Tensor]) -> Optimizer:
        flat = [param for param in params if param.dim() < 2]
        return AdamW([{"params": [p for p in params if p.dim() > 1]}, {"params": flat, "lr": 0.05}], lr=0.02, eps=0.1)

    loop = start(Residual(), make_optimizer=grouped)
    schedule = StepLR(loop.optimizer, 1, 0.5)
    for number in range(3):
        loop.step(number)
        schedule.step()
    loop.state()


@habit
def state_saved_and_loaded(start: Start) -> None:
    loop = start(Chain(), make_optimizer=adam)
    loop.step(0)
    saved = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    of_optimizer = copy.deepcopy(loop.optimizer.state_dict(**loop.whole()))
    loop.step(1)
    loop.model.load_state_dict(saved)
    loop.optimizer.load_state_dict(of_optimizer, **loop.whole())
    loop.step(2)
    loop.state()


# Loops


@habit
def evaluation_between(start: Start) -> None:
    loop = start(Residual())
    for number in range(3):
        loop.step(number)
        evaluated(loop, 10 + number)
    loop.state()


@habit
def short_batch(start: Start) -> None:
    loop = start(Chain())
    loop.step(0)
    loop.step(1, rows=8)
    loop.step(2)
    loop.state()


@habit
def gradients_of_inputs(start: Start) -> None:
    loop = start(Chain())
    for number in range(2):
        x, target = loop.batch(number)
        x.requires_grad_()
        loop.optimizer.zero_grad()
        loop.backward(loop.loss(x, target))
        assert x.grad is not None
        loop.job.rows("gradient of x", x.grad / loop.scaler.get_scale())
        loop.update()
    loop.state()


@habit
def two_calls_before_a_backward(start: Start) -> None:
    loop = start(Chain())
    for number in range(2):
        loop.optimizer.zero_grad()
        loop.backward(loop.loss(*loop.batch(number)) + 2 * loop.loss(*loop.batch(10 + number)))
        loop.update()
    loop.state()


@habit
def two_backwards_of_a_call(start: Start) -> None:
    loop = start(Chain())
    for number in range(2):
        loop.optimizer.zero_grad()
        loss = loop.loss(*loop.batch(number))
        loop.backward(loss, retain_graph=True)
        loop.backward(2 * loss)
        loop.update()
    loop.state()


@habit
def hooks_of_parameters(start: Start) -> None:
    net = Chain()
    net.layers[0].weight.register_hook(lambda grad: grad * 2)
    net.layers[3].bias.register_hook(lambda grad: grad * 0.5)
    start(net).train()


@habit
def gradients_zeroed_in_place(start: Start) -> None:
    loop = start(Chain())
    for number in range(3):
        loop.optimizer.zero_grad(set_to_none=False)
        for call in range(loop.row.calls):
            loop.backward(loop.loss(*loop.batch(2 * number + call)))
        loop.update()
    loop.state()


@habit
def infinite_batch_left_out(start: Start) -> None:
    loop = start(Chain(), make_optimizer=partial(SGD, lr=0.1))
    for number in range(4):
        x, target = loop.batch(number)
        target = target * (torch.inf if number == 1 else 1.0)
        loop.optimizer.zero_grad()
        loop.backward(loop.loss(x, target))
        if number != 1:
            loop.update()
        elif loop.precision.scaled:
            # The scaler sees it.
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        loop.job.same("scale", float(loop.scaler.get_scale()))
    loop.state()


@habit
def model_given_back(start: Start) -> None:
    loop = start(Chain())
    loop.step(0)
    loop.step(1)
    if hasattr(loop.model, "undeploy"):
        loop.model.undeploy()
    net: nn.Module = loop.net
    loop.job.same("given back", {name: param.detach() for name, param in net.named_parameters()})
