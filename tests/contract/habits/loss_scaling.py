"""Loss scaling: gradients that overflow somewhere, and what scripts do to scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from tests.contract.habit import equal
from tests.contract.job import Job
from tests.contract.settings import NOT_WHOLE
from tests.contract.training import Chain, clipped, pairs


class Gained(nn.Module):
    """The last layer has a parameter whose gradient overflows with the second argument."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.chain, self.gain, self.inside = Chain(), nn.Parameter(torch.zeros(())), inside

    def forward(self, x: Tensor, huge: Tensor, target: Tensor) -> Tensor:
        out = self.chain(x) + self.gain * huge
        return F.mse_loss(out, target) if self.inside else out


def _gained(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, target = pairs(rows, generator)
    return x, torch.zeros(rows, 1), target


def _gained_by_one(rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    x, huge, target = _gained(rows, generator)
    huge[0] = 1e308
    return x, huge, target


def _scaled(
    job: Job,
    inside: bool,
    clip: bool,
    make: Callable[[nn.Module], list[Optimizer]],
    *,
    scale: float = 1024.0,
    change: Callable[[nn.Module, list[Optimizer]], None] | None = None,
) -> None:
    """Trains with overflows in two steps.

    Args:
        change: what the script does to the optimizers before the second of them.
    """
    net = Gained(inside)
    optimizers = make(net)
    model = job.wrap(net, optimizers[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    for step in range(5):
        if step == 3 and change is not None:
            change(net, optimizers)
        x, huge, target = job.batch(_gained, step)
        if step in (1, 3):
            huge = huge + 1e308
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = model(x, huge, target)
        loss = out if inside else (out - target).square().sum() / max(1, len(x))
        scaler.scale(loss).backward()
        if clip:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = clipped(model, 0.5)
            job.same("norm", torch.where(norm.isfinite(), norm, -1.0))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        job.same("scale", scaler.get_scale())
    job.state(model)


def _one(net: nn.Module) -> list[Optimizer]:
    return [SGD(net.parameters(), lr=0.1, momentum=0.9)]


@equal()
def overflow_on_one_rank(job: Job) -> None:
    """`torch.amp.GradScaler`, and gradients of one Stage overflow: no rank steps, and all change the scale."""
    _scaled(job, True, False, _one)
    _scaled(job, False, False, _one)


def _changed_while_scaled(job: Job, change: Callable[[list[Tensor]], Any]) -> None:
    """Steps in which ``change`` is given the parameters while their gradients are scaled, once with an overflow."""
    net = Gained(True)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        x, huge, target = job.batch(_gained_by_one if step == 1 else _gained, step)
        optimizer.zero_grad()
        scaler.scale(model(x, huge, target)).backward()
        change(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        job.same("scale", scaler.get_scale())
    job.state(model)


@equal()
def overflow_clipped_by_value(job: Job) -> None:
    """Scaled gradients are clipped by value, without `scaler.unscale_` before: infinite ones are finite then."""
    _changed_while_scaled(job, lambda params: nn.utils.clip_grad_value_(params, 50.0))


@equal(NOT_WHOLE)
def overflow_cleaned_by_the_script(job: Job) -> None:
    """`torch.nan_to_num(param.grad, nan=0.0, ..., out=param.grad)` of scaled gradients: those are finite then."""

    def clean(params: list[Tensor]) -> None:
        for grad in [param.grad for param in params if param.grad is not None]:
            torch.nan_to_num(grad, nan=0.0, posinf=0.0, neginf=0.0, out=grad)
            torch.mul(grad, 0.5, out=grad)

    _changed_while_scaled(job, clean)


@equal()
def overflow_and_clipping(job: Job) -> None:
    """`scaler.unscale_(optimizer)`, then `model.clip_grad_norm(max_norm)`, then `scaler.step(optimizer)`."""
    _scaled(job, True, True, _one)
    _scaled(job, False, True, _one)


@equal()
def overflow_with_a_fused_optimizer(job: Job) -> None:
    """`torch.amp.GradScaler` with an optimizer that takes the scale itself."""
    _scaled(job, True, False, lambda net: [Adam(net.parameters(), lr=0.01, fused=True)])


@equal()
def overflow_beside_a_frozen_stage(job: Job) -> None:
    """`torch.amp.GradScaler`, and ranks whose Stage is frozen have nothing to step."""

    def head(net: nn.Module) -> list[Optimizer]:
        net.chain.layers.requires_grad_(False)  # type: ignore[operator, union-attr]
        return [SGD([param for param in net.parameters() if param.requires_grad], lr=0.1)]

    _scaled(job, True, True, head)


@equal()
def overflow_of_one_optimizer_of_several(job: Job) -> None:
    """`torch.amp.GradScaler` and three optimizers: those whose own gradients overflow leave out their step."""

    def three(net: nn.Module) -> list[Optimizer]:
        first: list[nn.Parameter] = list(net.chain.layers[0].parameters())  # type: ignore[index, union-attr]
        apart = {id(param) for param in (*first, net.gain)}
        rest = [param for param in net.parameters() if id(param) not in apart]
        return [SGD(first, lr=0.1), Adam([net.gain], lr=0.01), SGD(rest, lr=0.1)]  # type: ignore[list-item]

    _scaled(job, True, False, three)
    _scaled(job, False, False, lambda net: three(net)[::-1])


@equal()
def overflow_at_a_scale_of_1(job: Job) -> None:
    """`torch.amp.GradScaler(init_scale=1.0)`: what overflows leaves out its step."""
    _scaled(job, True, False, _one, scale=1.0)
    _scaled(job, False, True, _one, scale=1.0)


@equal()
def overflow_of_a_layer_that_was_moved(job: Job) -> None:
    """The script moves a parameter by hand to another optimizer's `param_groups`, under `torch.amp.GradScaler`."""

    def two(net: nn.Module) -> list[Optimizer]:
        first: list[nn.Parameter] = list(net.chain.layers[0].parameters())  # type: ignore[index, union-attr]
        rest = [param for param in net.parameters() if not any(param is other for other in first)]
        return [SGD(rest, lr=0.1), SGD(first, lr=0.05)]

    def move(net: nn.Module, optimizers: list[Optimizer]) -> None:
        """The gain, whose gradient overflows."""
        params = optimizers[0].param_groups[0]["params"]
        params[:] = [param for param in params if param is not net.gain]
        optimizers[1].param_groups[0]["params"].append(net.gain)

    _scaled(job, True, False, two, change=move)
    _scaled(job, False, False, two, change=move)
