"""What changes between calls: parameters, hooks, chance outside of torch, arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import pyrannc
from tests.contract.habit import alike, equal, refused, warned
from tests.contract.job import Data, Job
from tests.contract.settings import ONCE, REPLICAS, SPREAD, STAGES
from tests.contract.training import WIDTH, Chain, Returns, fit, learn, learn_around, pairs, regression

# Parameters


@equal()
def frozen_later(job: Job) -> None:
    """`requires_grad_(False)` on a layer after some steps."""
    net = regression()
    learn_around(job, net, lambda model: net.net.layers[1].requires_grad_(False))


@equal()
def unfrozen_later(job: Job) -> None:
    """A layer frozen at first gets `requires_grad_(True)` after some steps."""
    net = regression()
    net.net.layers[1].requires_grad_(False)
    learn_around(job, net, lambda model: net.net.layers[1].requires_grad_(True))


@equal()
def data_replaced(job: Job) -> None:
    """`param.data = new` after some steps."""

    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = param.data * 0.5

    learn_around(job, regression(), change)


def _halve(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())


@equal(settings=(REPLICAS,))
def vector_to_params(job: Job) -> None:
    """`vector_to_parameters(parameters_to_vector(model.parameters()), ...)` where every rank holds the whole model."""
    learn_around(job, regression(), _halve)


@refused("RaNNCError", "get_param", settings=(STAGES,), instead="`model.state_dict()`, `model.load_state_dict(state)`")
def params_to_vector_of_parts(job: Job) -> None:
    """The same where other ranks hold a part of the parameters."""
    learn_around(job, regression(), _halve)


@equal()
def vector_to_params_of_parts(job: Job) -> None:
    """`vector_to_parameters(vector, model.parameters())` with a vector that all ranks have."""

    def change(model: nn.Module) -> None:
        count = sum(param.numel() for param in model.parameters())
        vector_to_parameters(torch.linspace(-0.5, 0.5, count), model.parameters())

    learn_around(job, regression(), change)


@equal()
def optimizer_by_data(job: Job) -> None:
    """An optimizer by hand: `param.data = param.data - lr * param.grad`."""
    model = job.wrap(regression())
    for batch in job.batches(pairs):
        model.zero_grad()
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()
        for param in model.parameters():
            param.data = param.data - 0.1 * param.grad
    job.state(model)


@equal()
def data_changed_in_place(job: Job) -> None:
    """`param.data.mul_()`, as weight clipping does, after each step."""

    def change(model: nn.Module) -> None:
        for param in model.parameters():
            param.data.clamp_(-0.2, 0.2)

    learn_around(job, regression(), change)


class _Shrinking(nn.Module):
    """A layer whose weight the forward makes smaller, with its loss."""

    def __init__(self, change: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.chain = Chain()
        self.change = change

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.chain.head.weight)
        return F.mse_loss(self.chain(x), target)


@refused("CaptureError", "parameter 'chain.head.weight' in place", instead="compute with a changed copy")
def parameter_changed_in_forward(job: Job) -> None:
    """The forward changes a parameter in place, under `torch.no_grad()`, as a limit of its norm does."""
    job.wrap(_Shrinking(lambda weight: weight.mul_(0.9)))(*job.batch(pairs))


class _Centred(Chain):
    """Takes away from features what their mean was in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.centre.data.copy_(x.mean(0))
            self.begun.fill_(True)
        return super().forward(x - self.centre)


@refused("CaptureError", "call the model once before", instead="call the model once before it is wrapped")
def parameter_set_by_first_batch(job: Job) -> None:
    """The first forward of all sets a parameter by its batch, as in flows, and notes that in a buffer."""
    fit(job, Returns(_Centred(), F.mse_loss), pairs)


@equal()
def parameter_set_before(job: Job) -> None:
    """The same, and the script calls the model once before it is wrapped, on the same batch on all ranks."""
    net = Returns(_Centred(), F.mse_loss)
    with torch.no_grad():
        net(*pairs(8, torch.Generator().manual_seed(7)))
    fit(job, net, pairs)


@equal()
def parameter_limited_in_forward(job: Job) -> None:
    """The forward limits a parameter's elements in place, by `param.clamp_()` under `torch.no_grad()`."""
    learn_around(job, _Shrinking(lambda weight: weight.clamp_(max=0.1)), lambda model: None)


@equal()
def data_limited_in_forward(job: Job) -> None:
    """Likewise, by `param.data.clamp_()`."""
    learn_around(job, _Shrinking(lambda weight: weight.data.clamp_(-0.1, 0.1)), lambda model: None)


@warned("added to the model since", instead="make all modules before wrapping, to plan once only")
def layer_added_later(job: Job) -> None:
    """A layer with parameters is added to the model after the first call."""
    net = regression()

    def change(model: nn.Module) -> None:
        net.net.layers.append(nn.Linear(WIDTH, WIDTH))

    learn_around(job, net, change)


class _Chooses(nn.Module):
    """Puts another sub-module in the place of one at its first call."""

    def __init__(self, chosen: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.chain = Chain()
        self.last: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.is_chosen = False
        self.chosen = chosen

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if not self.is_chosen:
            self.is_chosen = True
            self.last = self.chosen(self.last)  # type: ignore[arg-type]
        return F.mse_loss(self.last(self.chain(x)), target)


@equal()
def layer_taken_over_in_forward(job: Job) -> None:
    """The first call puts a new sub-module in the place of one, which takes over its parameters, as BigBird does."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def chosen(old: nn.Linear) -> nn.Module:
        new = Scaled(WIDTH, WIDTH)
        new.weight, new.bias = old.weight, old.bias
        return new

    net = _Chooses(chosen)
    learn_around(job, net, lambda model: None)
    job.same("class of the sub-module", isinstance(net.last, Scaled))


@refused(
    "CaptureError", "parameter 'last.weight' in the forward", "before the optimizer",
    instead="call the model once before the optimizer and `RaNNCModule` are made",
)  # fmt: skip
def layer_made_in_forward(job: Job) -> None:
    """The first call puts a new sub-module with parameters of its own in the place of one."""
    job.wrap(_Chooses(lambda old: nn.Linear(WIDTH, WIDTH)))(*job.batch(pairs))


@equal()
def activation_replaced(job: Job) -> None:
    """A module without parameters is replaced after the first call."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.act: nn.Module = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))  # type: ignore[no-any-return]

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "act", nn.Sigmoid()))


def _pruned_further(job: Job, between: Callable[[Returns], Any]) -> None:
    net = regression()
    layer = prune.l1_unstructured(net.net.layers[0], "weight", 0.2)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = job.wrap(net, optimizer)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    if isinstance(model, pyrannc.RaNNCModule):
        model.undeploy()
    between(net)
    prune.l1_unstructured(layer, "weight", 0.3)
    learn(job, model, optimizer, step=2)
    job.state(model)


@refused("RaNNCError", "call the wrapped model itself after undeploy", instead="call the wrapped model itself before")
def pruned_further(job: Job) -> None:
    """After `undeploy()`, a layer is pruned by the weights that the last forward has left in an attribute."""
    _pruned_further(job, lambda net: None)


@equal()
def pruned_further_after_a_forward(job: Job) -> None:
    """The same after a call of the wrapped model itself."""
    _pruned_further(job, lambda net: net(*job.batch(pairs)))


@refused("InputError", "undeploy", instead="`undeploy()` before it is replaced")
def layer_replaced(job: Job) -> None:
    """A module with parameters is replaced after the first call (a new head)."""
    net = regression()
    learn_around(job, net, lambda model: setattr(net.net, "head", nn.Linear(WIDTH, WIDTH)))


@refused("InputError", "undeploy", instead="`undeploy()` before it is replaced")
def tied_layer_replaced(job: Job) -> None:
    """The same of one of two modules that share a weight."""
    net = regression()
    net.net.head.weight = net.net.layers[0].weight
    learn_around(job, net, lambda model: setattr(net.net, "head", nn.Linear(WIDTH, WIDTH)))


@equal()
def layer_replaced_in_between(job: Job) -> None:
    """The same after `undeploy()`, with a new optimizer of all parameters."""
    net = regression()
    model = job.wrap(net, (optimizer := SGD(net.parameters(), lr=0.1)))
    learn(job, model, optimizer)
    if isinstance(model, pyrannc.RaNNCModule):
        model.undeploy()
    torch.manual_seed(7)
    net.net.head = nn.Linear(WIDTH, WIDTH)
    model = job.wrap(net, (optimizer := SGD(net.parameters(), lr=0.1)))
    for step in range(1, 4):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused(
    "RaNNCError|InputError|MismatchError", "lr|learning rate", instead="give every rank the same value: the mean loss"
)
def rate_by_own_loss(job: Job) -> None:
    """`ReduceLROnPlateau` is fed with a loss of this rank's rows, so that ranks get different learning rates."""
    net = Chain()
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
    model = job.wrap(net, optimizer)
    for step, (x, target) in enumerate(job.batches(pairs, 4)):
        optimizer.zero_grad()
        out = model(x)
        job.rows("output", out)
        ((out - target).square().sum() / max(1, len(x))).backward()
        job.gradients(model)
        optimizer.step()
        # One rank sees its loss fall, the others see theirs rise.
        scheduler.step(float(step) if job.rank else -float(step))


# Hooks


@refused("CaptureError|RaNNCError", "hook", instead="return what the hook would keep as an output of the model")
def forward_hook_keeps(job: Job) -> None:
    """A forward hook keeps what a layer returns."""
    net = regression()
    kept: list[Tensor] = []
    net.net.layers[0].register_forward_hook(lambda module, args, out: kept.append(out.detach().sum()))
    model = job.wrap(net)
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@equal()
def forward_hook_returns(job: Job) -> None:
    """A forward hook that changes what a layer returns, registered before the first call."""
    net = regression()
    net.net.layers[0].register_forward_hook(lambda module, args, out: out * 0.5)
    learn_around(job, net, lambda model: None)


@equal()
def forward_hook_asks_for_gradients(job: Job) -> None:
    """A forward hook of a frozen layer calls `out.requires_grad_(True)`, as `gradient_checkpointing_enable` has it."""
    net = regression()
    net.net.layers[0].requires_grad_(False).register_forward_hook(_require_gradients)
    learn_around(job, net, lambda model: None)


def _require_gradients(module: nn.Module, args: Any, out: Tensor) -> None:
    out.requires_grad_(True)


@refused("RaNNCError|CaptureError|InputError", "hook", instead="register hooks before the first call")
def forward_hook_added_later(job: Job) -> None:
    """A forward hook is registered after the first call."""
    net = regression()
    learn_around(job, net, lambda model: net.net.layers[0].register_forward_hook(lambda module, args, out: out * 0.5))


@refused("CaptureError|RaNNCError", "hook", instead="put an `autograd.Function` into the model")
def backward_hook(job: Job) -> None:
    """A module has a backward hook (`register_full_backward_hook`)."""
    net = regression()
    net.net.layers[0].register_full_backward_hook(lambda module, grads, outs: None)
    learn_around(job, net, lambda model: None)


@equal()
def gradient_hook(job: Job) -> None:
    """A parameter has a hook (`param.register_hook`)."""
    net = regression()
    net.net.layers[1].weight.register_hook(lambda grad: grad * 0)
    learn_around(job, net, lambda model: None)


@equal()
def hook_after_accumulation(job: Job) -> None:
    """A parameter has a hook that runs after its gradient (`register_post_accumulate_grad_hook`)."""
    net = regression()

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    net.net.layers[1].weight.register_post_accumulate_grad_hook(halve)
    learn_around(job, net, lambda model: None)


# Chance and time outside of torch


_DRAWN = "what draws stays whole, alike on all ranks; the numbers are not those of the plain model"


@alike(settings=SPREAD, note=_DRAWN)
def python_random(job: Job) -> None:
    """The model draws from Python's `random`."""
    model = job.wrap(Returns(Chain(), lambda y, target: F.mse_loss(y * (1 + random.random()), target)))
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@alike(settings=SPREAD, note=_DRAWN)
def numpy_random(job: Job) -> None:
    """The model draws from numpy's global generator."""
    model = job.wrap(Returns(Chain(), lambda y, target: F.mse_loss(y * (1 + float(np.random.rand())), target)))
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@refused("CaptureError", "generator", "torch.rand", instead="draw with torch, or from the generators that all use")
def own_generator(job: Job) -> None:
    """The model draws from a generator of its own (`self.rng = np.random.default_rng(0)`)."""
    net = Chain()
    net.rng = np.random.default_rng(0)
    model = job.wrap(Returns(net, lambda y, target: F.mse_loss(y * (1 + net.rng.random()), target)))
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@refused("CaptureError", "generator", "torch.rand", instead="draw without `generator=`, after `torch.manual_seed`")
def own_torch_generator(job: Job) -> None:
    """The model draws from a `torch.Generator` of its own (`torch.rand(shape, generator=self.rng)`)."""
    net = Chain()
    net.rng = torch.Generator().manual_seed(0)
    model = job.wrap(Returns(net, lambda y, target: F.mse_loss(y * torch.rand(y.shape, generator=net.rng), target)))
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@equal()
def idle_torch_generator(job: Job) -> None:
    """The model holds a `torch.Generator`, from which its forward does not draw."""
    net = Chain()
    net.rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        net.head.weight.uniform_(-1, 1, generator=net.rng)
    learn_around(job, Returns(net, F.mse_loss), lambda model: None)


@alike(settings=SPREAD, note="what draws stays whole, alike on all ranks")
def given_default_generator(job: Job) -> None:
    """The model draws with `generator=torch.default_generator`."""
    torch.manual_seed(3)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y * torch.rand(y.shape[-1:], generator=torch.default_generator), target)

    model = job.wrap(Returns(Chain(), loss))
    for batch in job.batches(pairs):
        job.same("loss", model(*batch))


@equal()
def generators_of_the_script(job: Job) -> None:
    """The script draws from `random` and numpy between calls of a model that draws from them too."""
    model = job.wrap(Returns(Chain(), lambda y, target: F.mse_loss(y + 0 * random.random(), target)))
    for batch in job.batches(pairs):
        random.seed(1)
        np.random.seed(1)
        model(*batch)
        job.same("numpy's", np.random.rand())


# Arguments


@refused("InputError|MismatchError", "rank", instead="give every rank the same value, or one value per row")
def scalar_differs(job: Job) -> None:
    """A 0-dim tensor among the arguments has another value on each rank."""
    model = job.wrap(Returns(Chain(), lambda y, target, scale: F.mse_loss(y, target) * scale))
    x, target = job.batch(pairs)
    job.same("loss", model(x, target, torch.tensor(1.0 + job.rank)))


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


@refused("RaNNCError|InputError|CaptureError", "question|answer", instead="use `torch.where`")
def answer_changes(job: Job) -> None:
    """The model asks its data a question (`if (x > 0).all()`), and a later batch answers otherwise."""

    def data(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x, target = pairs(rows, generator)
        return x, target + (200 if generator.initial_seed() == 1 else 0)

    model = job.wrap(Returns(Chain(), _if_large))
    for batch in job.batches(data):
        loss = model(*batch)
        loss.backward()
        job.same("loss", loss)
        job.gradients(model)


@equal(note="another answer is an error; with `torch.where` both are possible")
def answer_stays(job: Job) -> None:
    """The model asks its data a question, and every batch gives the same answer."""
    learn_around(job, Returns(Chain(), _if_large), lambda model: None)


# What training does with all rows, and evaluation with each by itself


class _Normalised(nn.Module):
    """Inputs are centred by a running mean, which training takes over all rows first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.layers = Chain()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return F.mse_loss(self.layers(x - self.mean), target)


class _Images(nn.Module):
    """Statistics of each image in training, running ones in evaluation, and layers before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
        self.last = nn.Conv2d(4, 2, 3)
        self.norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.norm(self.first(images)).relu()).mean((1, 2, 3)).square().mean()


def _images(rows: int, generator: Generator) -> tuple[Tensor]:
    return (torch.randn(rows, 3, 7, 7, generator=generator),)


def _train_and_evaluate(job: Job, net: nn.Module, data: Data, *, evaluates_first: bool = False) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            job.same("evaluation", model(*job.batch(data, 9)))

    if evaluates_first:
        evaluate()
    for epoch in range(2):
        model.train()
        for step in range(2):
            learn(job, model, optimizer, data, step=2 * epoch + step)
        evaluate()
    job.state(model)


@equal()
def evaluated_with_a_running_mean(job: Job) -> None:
    """A mean over all rows is kept in training, before layers that evaluation runs with it on each row by itself."""
    _train_and_evaluate(job, _Normalised(), pairs)


@equal()
def evaluated_with_running_statistics(job: Job) -> None:
    """`nn.InstanceNorm2d(..., affine=True, track_running_stats=True)`, trained and evaluated in turn."""
    _train_and_evaluate(job, _Images(), _images)


class _Ramped(nn.Module):
    """A term over all rows gets a weight that grows with each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(()))
        self.steps: Tensor
        self.rows: Tensor
        self.layers = Chain()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        y = self.layers(x)
        if self.training:
            self.rows.add_(torch.ones_like(y[:, 0]).sum())
        return F.mse_loss(y, target) + torch.clamp(self.steps / 4, max=1.0) * y.square().mean().sqrt()


@equal()
def evaluated_with_a_counter_of_steps(job: Job) -> None:
    """Training counts its steps in a buffer, by which both weight a term over all rows of the batch."""
    _train_and_evaluate(job, _Ramped(), pairs)


@equal()
def counter_of_steps_after_an_evaluation(job: Job) -> None:
    """The same, and an evaluation comes first."""
    _train_and_evaluate(job, _Ramped(), pairs, evaluates_first=True)


@refused("PlanError", "no gradients for", "no_grad", settings=ONCE, instead="evaluate under `torch.no_grad()`")
def gradients_with_a_running_mean(job: Job) -> None:
    """As the first of them, but evaluation records gradients."""
    net = _Normalised()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    model.eval()
    model(*job.batch(pairs, 1)).backward()
