"""What a forward does to gradients: hooks of what it computes, which get those of some rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import DIVIDED, TOGETHER
from tests.contract.training import WIDTH, Chain, Returns, fit, pairs, regression

_OF_ALL_ROWS = 'change gradients of parameters after `backward()`, or say `row_mixing="microbatch"`'


def _inside(job: Job, layer: nn.Module) -> None:
    """A chain with a layer in its middle."""
    net = Chain(5)
    net.layers[3] = layer
    fit(job, Returns(net, F.mse_loss), pairs)


class _Hooked(nn.Module):
    """Its result's gradient passes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if y.requires_grad:
            y.register_hook(self.hook(x, y))
        return y

    def hook(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return self.changed

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


@equal()
def hook_of_each_row(job: Job) -> None:
    """A hook in the forward limits each element of a gradient (`y.register_hook(lambda g: g.clamp(-1, 1))`)."""
    _inside(job, _Hooked())


class _Counting(_Hooked):
    def changed(self, gradient: Tensor) -> Tensor:
        return torch.stack([gradient[row] * 0.5 for row in range(len(gradient))]) if len(gradient) else gradient


@equal()
def hook_that_counts_rows(job: Job) -> None:
    """A hook in the forward goes through the rows that it gets in a loop (`range(len(g))`)."""
    _inside(job, _Counting())


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]  # torch has any arguments
        return torch.stack([gradient[row] * 0.5 for row in range(len(gradient))]) if len(gradient) else gradient


class _OwnBackward(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = _Halved.apply(self.inner(x))
        return made


@equal()
def own_backward_that_counts_rows(job: Job) -> None:
    """So does the backward of an `autograd.Function`."""
    _inside(job, _OwnBackward())


class _Normed(_Hooked):
    def changed(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


@refused("CaptureError", "hook of gradients at", "microbatch", settings=DIVIDED, instead=_OF_ALL_ROWS)
def hook_of_all_rows(job: Job) -> None:
    """A hook in the forward divides a gradient by its norm, which is that of all rows."""
    _inside(job, _Normed())


@equal(settings=TOGETHER, note="where one Replica has all rows in one microbatch")
def hook_of_all_rows_together(job: Job) -> None:
    """Likewise."""
    _inside(job, _Normed())


class _Form(_Hooked):
    def hook(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient / y.shape[-1]


@equal()
def hook_with_a_width_of_the_forward(job: Job) -> None:
    """A hook in the forward divides a gradient by the width of a tensor there (`g / y.shape[-1]`)."""
    _inside(job, _Form())


class _PerRow(_Hooked):
    def hook(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda gradient: gradient / len(x)


@warned("uses what its forward has computed", instead="divide the loss, or the gradients after `backward()`")
def hook_with_the_number_of_rows(job: Job) -> None:
    """A hook in the forward divides a gradient by the number of rows there (`g / len(x)`)."""
    _inside(job, _PerRow())


class _AtTheEnd(nn.Module):
    """The loss, whose gradient passes through a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = Chain()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = self.loss(x, target)
        if loss.requires_grad:
            loss.register_hook(self.changed)
        return loss

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.chain(x), target).sqrt()

    def changed(self, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1.0)


@equal()
def hook_where_rows_have_met(job: Job) -> None:
    """A hook in the forward divides the gradient of a number that all rows together have made by its norm."""
    fit(job, _AtTheEnd(), pairs)


class _Loss(_AtTheEnd):
    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.chain(x), target)


@refused("CaptureError", "what the model returns for all rows", instead="`loss = model(...); loss.register_hook(...)`")
def hook_of_the_loss(job: Job) -> None:
    """The forward gives the loss that it returns a hook."""
    fit(job, _Loss(), pairs)


@equal()
def hook_of_the_loss_outside(job: Job) -> None:
    """The script gives the loss that the model returns a hook."""

    def hooked(loss: Tensor) -> Tensor:
        loss.register_hook(lambda gradient: gradient * 0.5)
        return loss

    fit(job, regression(), pairs, loss=hooked)


class _Weighed(_Hooked):
    def hook(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        weights = torch.sigmoid(x.detach())
        return lambda gradient: gradient * weights


@warned(
    "uses what its forward has computed", instead="an `autograd.Function` saves it for its backward, and stays alone"
)
def hook_with_tensors_of_the_forward(job: Job) -> None:
    """A hook in the forward multiplies a gradient by what the forward computes."""
    _inside(job, _Weighed())


class _WeighedInAList(_Hooked):
    def hook(self, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
        kept = {"weights": [torch.sigmoid(x.detach())]}
        return lambda gradient: gradient * kept["weights"][0]


@warned("uses what its forward has computed", instead="likewise")
def hook_with_lists_of_the_forward(job: Job) -> None:
    """Likewise, where that is in a container."""
    _inside(job, _WeighedInAList())


class _HookedWeight(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight * 0.5
        if weight.requires_grad:
            weight.register_hook(self.changed)
        return F.linear(x, weight, self.inner.bias)


@refused("CaptureError", "hook of gradients at", "after backward", settings=DIVIDED, instead=_OF_ALL_ROWS)
def hook_of_a_weight(job: Job) -> None:
    """A hook in the forward limits the gradient of what is computed of a weight, a sum over all rows."""
    _inside(job, _HookedWeight())


class _Masked(_HookedWeight):
    def changed(self, gradient: Tensor) -> Tensor:
        return gradient * torch.eye(WIDTH, device=gradient.device)


@equal()
def hook_of_a_weight_in_parts(job: Job) -> None:
    """A hook in the forward masks such a gradient, which may be done to each part of the sum."""
    _inside(job, _Masked())


class _Doubled(_HookedWeight):
    def changed(self, gradient: Tensor) -> Tensor:
        return gradient * 2


@equal()
def hook_of_a_weight_that_scales(job: Job) -> None:
    """A hook in the forward doubles such a gradient."""
    _inside(job, _Doubled())


class _OfAParameter(_Hooked):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.inner.weight.register_hook(self.changed)
        y: Tensor = self.inner(x)
        return y


@refused("CaptureError", "one more hook at each call", instead="give it one before the first call")
def hook_of_a_parameter_in_the_forward(job: Job) -> None:
    """The forward gives a parameter a hook, at each call one more."""
    _inside(job, _OfAParameter())


class _Penalised(_AtTheEnd):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        size = self.chain.layers[0].weight.square().sum()
        if size.requires_grad:
            size.register_hook(lambda gradient: gradient * 0.5)
        return F.mse_loss(self.chain(x), target) + size * 0.01


@refused("CaptureError", "made of parameters alone", instead="give parameters hooks before the first call")
def hook_of_a_penalty(job: Job) -> None:
    """A hook in the forward scales the gradient of a penalty on parameters, which is added to the loss."""
    fit(job, _Penalised(), pairs)


class _Noting(_Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.zeros(()))

    def changed(self, gradient: Tensor) -> Tensor:
        self.size.mul_(0.9).add_(gradient.norm())
        return gradient


@refused("CaptureError", "changes a tensor in place", instead="use gradients of parameters after `backward()`")
def hook_that_changes_a_buffer(job: Job) -> None:
    """A hook in the forward keeps a running norm of gradients in a buffer."""
    _inside(job, _Noting())
