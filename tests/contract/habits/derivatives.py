"""Derivatives that the model takes itself, and what it does to gradients: hooks, backwards of its own.

What may be done to the gradients of each part of the batch is: trials show it. Otherwise the smallest part of the model
that holds it runs as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import ONCE, Setting
from tests.contract.training import WIDTH, Chain, Returns, fit, pairs

_KEPT = r"stays in one piece"
_ONE_STAGE = (Setting((5, 3), 1, 2), Setting((3, 0, 5), 1, 1))


def _around(job: Job, late: nn.Module) -> None:
    """A chain with a sub-module before its last layers."""
    net = Chain(5)
    net.layers[3] = late
    fit(job, Returns(net, F.mse_loss), pairs)


class _Hooked(nn.Module):
    """Its result's gradient passes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(self.changed)
        return y

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


@equal()
def hook_of_each_row(job: Job) -> None:
    """A hook in the forward limits each element of a gradient (`y.register_hook(lambda g: g.clamp(-1, 1))`)."""
    _around(job, _Hooked())


class _Normed(_Hooked):
    def changed(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


@warned(_KEPT, "gradients of all rows", "on all rows", instead="a hook that treats each row by itself")
def hook_of_all_rows(job: Job) -> None:
    """A hook in the forward divides a gradient by its norm, which is that of all rows."""
    _around(job, _Normed())


class _Weighed(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        weights = torch.sigmoid(x.detach())
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * weights)
        return y


@warned(_KEPT, "what the forward computes", instead="an `autograd.Function`, which saves it for its backward")
def hook_with_tensors_of_the_forward(job: Job) -> None:
    """A hook in the forward multiplies a gradient by what the forward computes."""
    _around(job, _Weighed())


class _HookedWeight(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight * 0.5
        if weight.requires_grad:
            weight.register_hook(self.changed)
        return F.linear(x, weight, self.inner.bias)


@warned(
    _KEPT, "gradients of all rows", instead="`param.register_hook(...)` before the first call, or a limit of the step"
)
def hook_of_a_weight(job: Job) -> None:
    """A hook in the forward limits the gradient of what is computed of a weight, a sum over all rows."""
    _around(job, _HookedWeight())


class _Masked(_HookedWeight):
    def changed(self, gradient: Tensor) -> Tensor:
        return gradient * torch.eye(WIDTH)


@equal()
def hook_of_a_weight_in_parts(job: Job) -> None:
    """A hook in the forward masks such a gradient, which parts of the sum show as well."""
    _around(job, _Masked())


class _UnitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]  # torch has any arguments
        return gradient / (gradient.norm() + 1e-6)


class _OwnBackward(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, _UnitGradient.apply(self.inner.weight), self.inner.bias)


@warned(_KEPT, "gradients of all rows", instead="a backward that may be given each part of the sum")
def own_backward_of_a_weight(job: Job) -> None:
    """An `autograd.Function` of a weight divides its gradient, a sum over all rows, by its norm."""
    _around(job, _OwnBackward())


class _Slope(nn.Module):
    """The derivatives of a small net by what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Chain(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        slopes: Tensor = torch.vmap(torch.func.grad(lambda row: self.energy(row).squeeze(-1)))(x)
        return slopes


@warned(_KEPT, "differentiates inside of the forward", instead="it stays on each rank's rows where trials allow it")
def derivative_of_a_sub_module(job: Job) -> None:
    """A sub-module differentiates by its rows: `torch.vmap(torch.func.grad(...))(x)`, as in networks for physics."""
    _around(job, _Slope())


class _Residual(_Slope):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # it has a target
        return F.mse_loss(super().forward(x), target) + self.energy(x).square().mean()


@warned("The whole model", settings=_ONE_STAGE, instead="`allow_uncut=True`: all ranks compute the global batch")
def derivative_in_the_forward(job: Job) -> None:
    """The model's own forward does so, and uses the same layers beside."""
    fit(job, _Residual(), pairs, allow_uncut=True)


@refused(
    "CaptureError", "differentiates inside of the forward", "allow_uncut", settings=ONCE, instead="`allow_uncut=True`"
)
def derivative_in_a_forward_that_is_cut(job: Job) -> None:
    """The same, without `allow_uncut=True`."""
    job.wrap(_Residual())(*job.batch(pairs))


class _Queue(nn.Module):
    """A queue of keys, which a method that is decorated fills."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()
        self.register_buffer("queue", torch.randn(24, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        place = int(self.place)
        self.queue[place : place + len(keys)] = keys
        self.place[0] = (place + len(keys)) % len(self.queue)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        queries = self.chain(x)
        logits = torch.cat([(queries * other).sum(1, keepdim=True), queries @ self.queue.clone().T], 1)
        self.enqueue(other)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


@warned(
    _KEPT, r"\. method enqueue of the model, with", instead="`torch.cat([keys, self.queue])[:size]` needs no number"
)
def queue_in_a_decorated_method(job: Job) -> None:
    """A method under `@torch.no_grad()` puts keys into a queue, a buffer, at a place that is a number (`int(...)`)."""
    fit(job, _Queue(), pairs)
