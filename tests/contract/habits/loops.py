"""How training loops are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import FREE, ONCE, REPLICAS, STAGES
from tests.contract.training import (
    CLASSES,
    WIDTH,
    Chain,
    Returns,
    classes,
    clipped,
    fit,
    learn,
    pairs,
    regression,
    single,
)


@equal(settings=FREE)
def plan_of_the_search(job: Job) -> None:
    """The search chooses Stages, Replicas and microbatches."""
    fit(job, regression(), pairs)


@equal()
def schedulers(job: Job) -> None:
    """A learning rate scheduler steps after each step or each epoch."""
    for make in (
        lambda optimizer: StepLR(optimizer, 1, 0.5),
        lambda optimizer: CosineAnnealingLR(optimizer, 3),
        lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=4),
    ):
        net = regression()
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        model = job.wrap(net, optimizer)
        for step in range(3):
            learn(job, model, optimizer, step=step)
            scheduler.step()
            job.same("lr", scheduler.get_last_lr())
        job.state(model)


@equal()
def parameter_groups(job: Job) -> None:
    """The optimizer has several groups of parameters."""
    net = regression()
    decayed = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() < 2]
    optimizer = AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.05}], lr=0.01)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def accumulated_gradients(job: Job) -> None:
    """Gradients of two batches add up before a step."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step, batch in enumerate(job.batches(pairs, 4)):
        (model(*batch) / 2).backward()
        job.gradients(model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    job.state(model)


@equal()
def zeroed_gradients(job: Job) -> None:
    """`optimizer.zero_grad(set_to_none=False)`, or `model.zero_grad()`, before a backward."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step, batch in enumerate(job.batches(pairs, 4)):
        if step % 2:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=False)
        model(*batch).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal(note="`nn.utils.clip_grad_norm_` sees this rank's gradients only")
def clipped_by_the_module(job: Job) -> None:
    """`model.clip_grad_norm(max_norm)` before a step."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs):
        optimizer.zero_grad()
        model(*batch).backward()
        job.same("norm", clipped(model, 0.1))
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def training_and_evaluation(job: Job) -> None:
    """`model.eval()` under `torch.no_grad()` between steps, then `model.train()`."""
    net = Chain()
    net.layers[1] = nn.Sequential(net.layers[1], nn.Dropout(0.0), nn.LayerNorm(WIDTH))
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    for step, (x, target) in enumerate(job.batches(pairs)):
        model.train()
        optimizer.zero_grad()
        ((model(x) - target).square().sum() / max(1, len(x))).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            job.rows("evaluated", model(*job.batch(single, 10 + step)))
    job.state(model)


@equal()
def gradients_switched_off_first(job: Job) -> None:
    """The first call is under `torch.no_grad()`, as to check that all is well; training follows."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    with torch.no_grad():
        job.same("first", model(*job.batch(pairs, 7)))
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def two_calls_one_backward(job: Job) -> None:
    """Two calls of the model, then one backward of the sum."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        first, second = model(*job.batch(pairs, step)), model(*job.batch(pairs, 10 + step))
        (first + 2 * second).backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def kept_graph(job: Job) -> None:
    """`backward(retain_graph=True)`, then a second backward."""
    model = job.wrap(regression())
    loss = model(*job.batch(pairs))
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    job.gradients(model)


@refused("RaNNCError", "retain_graph=True", instead="call `loss.backward(retain_graph=True)` the first time")
def graph_not_kept(job: Job) -> None:
    """A second `backward()` for the same call, without `retain_graph=True`."""
    model = job.wrap(regression())
    loss = model(*job.batch(pairs))
    loss.backward()
    job.gradients(model)
    # Of the same call, through another node of the script's.
    loss.backward()


@equal()
def state_loaded_before(job: Job) -> None:
    """A saved state is loaded into the model and the optimizer before the first call."""
    net = regression()
    optimizer = Adam(net.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        net(*pairs(4, Generator().manual_seed(5))).backward()
        optimizer.step()
    saved, saved_optimizer = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    net = regression()
    optimizer = Adam(net.parameters(), lr=0.5)
    model = job.wrap(net, optimizer)
    model.load_state_dict(saved)
    optimizer.load_state_dict(saved_optimizer)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def state_round_trip(job: Job) -> None:
    """`model.state_dict()` on all ranks, more steps, and `model.load_state_dict()` back."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learn(job, model, optimizer, step=1)
    model.load_state_dict(saved)
    learn(job, model, optimizer, step=2)
    job.state(model)


@equal()
def output_changed_in_place(job: Job) -> None:
    """The script changes outputs in place."""
    model = job.wrap(Chain())
    for x, target in job.batches(pairs):
        out = model(x)
        out.mul_(2.0).sub_(target)
        job.rows("output", out)
        (out.square().sum() / max(1, len(x))).backward()
        job.gradients(model)


@equal()
def evaluated_output_changed_in_place(job: Job) -> None:
    """The script changes outputs in place that it got under `torch.no_grad()`."""
    model = job.wrap(Chain())
    with torch.no_grad():
        for (x,) in job.batches(single):
            out = model(x)
            out.mul_(2.0).add_(x)
            job.rows("output", out)


@equal()
def loss_changed_in_place(job: Job) -> None:
    """The script divides the loss in place (`loss /= 4`)."""
    model = job.wrap(regression())
    for batch in job.batches(pairs):
        loss = model(*batch)
        loss /= 4
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


@equal()
def error_caught(job: Job) -> None:
    """An error of a step is caught on all ranks, and the loop goes on."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(3):
        try:
            x, target = job.batch(pairs, step)
            model(x[:, :-1] if step == 1 else x, target)
            job.same("survived", step)
        except RuntimeError:
            job.same("caught", step)
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def input_gradients(job: Job) -> None:
    """The script asks for gradients of its inputs by `requires_grad_()`."""
    model = job.wrap(regression())
    for x, target in job.batches(pairs):
        x.requires_grad_()
        model(x, target).backward()
        job.rows("gradient of x", x.grad)
        job.gradients(model)


@equal()
def two_models_in_one_loss(job: Job) -> None:
    """A loss adds up what two wrapped models return."""
    nets = [Chain(), Chain(3)]
    optimizers = [Adam(net.parameters(), lr=0.01) for net in nets]
    models = [job.wrap(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    for x, target in job.batches(pairs):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = models[0](x) + models[1](x)
        ((out - target).square().sum() / max(1, len(x))).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            job.gradients(model)
            optimizer.step()


@equal()
def one_model_after_another(job: Job) -> None:
    """A wrapped model takes what another wrapped model returns, as a critic and a generator."""
    generator, critic = Chain(), Chain(3, 1)
    optimizer = SGD(generator.parameters(), lr=0.1)
    make, judge = job.wrap(generator, optimizer), job.wrap(critic)
    for (x,) in job.batches(single):
        optimizer.zero_grad()
        judge.zero_grad()
        (judge(make(x)).sum() / max(1, len(x))).backward()
        job.gradients(judge)
        job.gradients(make)
        optimizer.step()
    job.state(make)


@refused("RaNNCError|MismatchError", "wrapped model takes", "detach", instead="put both into one module, or `detach()`")
def loss_goes_on_on_one_rank(job: Job) -> None:
    """On one rank alone, a wrapped model takes what was computed from the loss that another one returned."""
    first, second = job.wrap(Returns(Chain(), F.mse_loss)), job.wrap(Chain(3))
    for x, target in job.batches(pairs):
        loss = first(x, target)
        scaled = x * loss if job.rank == 0 else x.requires_grad_()
        job.rows("output", second(scaled))


@equal()
def model_that_returns_its_loss_after_another(job: Job) -> None:
    """A wrapped model that returns its loss takes what another wrapped model returns."""
    net = Chain()
    optimizer = SGD(net.parameters(), lr=0.1)
    first, second = job.wrap(net, optimizer), job.wrap(Returns(Chain(3), F.mse_loss))
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        second.zero_grad()
        second(first(x), target).backward()
        job.gradients(second)
        job.gradients(first)
        optimizer.step()
    job.state(first)


@equal()
def optimizer_by_hand(job: Job) -> None:
    """The script updates `model.parameters()` in place under `torch.no_grad()`."""
    model = job.wrap(regression())
    for batch in job.batches(pairs):
        model.zero_grad()
        model(*batch).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
    job.state(model)


@equal()
def optimizer_made_later(job: Job) -> None:
    """The optimizer is made of `model.parameters()` after the first call."""
    model = job.wrap(regression())
    job.same("first", model(*job.batch(pairs, 9)))
    optimizer = Adam(model.parameters(), lr=0.01)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@equal()
def step_with_closure(job: Job) -> None:
    """`optimizer.step(closure)` with an optimizer that calls the closure once."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(*batch)
            loss.backward()
            return loss

        job.same("loss", optimizer.step(closure))
        job.gradients(model)
    job.state(model)


@equal()
def average_of_weights(job: Job) -> None:
    """The script keeps a moving average of the state that `model.state_dict()` gives."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    average = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    for step in range(3):
        learn(job, model, optimizer, step=step)
        for name in average:
            param = model.get_param(name) if hasattr(model, "get_param") else net.get_parameter(name)
            average[name].mul_(0.9).add_(param.detach(), alpha=0.1)
    job.same("average", average)


@equal()
def last_batch_is_short(job: Job) -> None:
    """The last batch has fewer rows."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for rows in (16, 8):
        optimizer.zero_grad()
        loss = model(*job.batch(pairs, rows=rows))
        job.same("loss", loss)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal()
def losses_kept(job: Job) -> None:
    """The script keeps losses in a list and takes their mean at the end of the epoch."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    losses = [learn(job, model, optimizer, step=step) for step in range(3)]
    job.same("mean", torch.stack(losses).mean())


@equal()
def classification(job: Job) -> None:
    """A classifier whose criterion stands outside, with rows as weights."""
    criterion = nn.CrossEntropyLoss(reduction="none")

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return criterion(logits, labels).sum() / max(1, len(labels))

    fit(job, Chain(outputs=CLASSES), classes, criterion=loss, optimizer=lambda params: Adam(params, lr=0.01))


@warned("to.. and cuda.. do nothing", instead="leave it out: the Plan places the parameters")
def moved_after_wrapping(job: Job) -> None:
    """`model.to(device)` after wrapping."""
    net = regression()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer).to("cpu")
    learn(job, model, optimizer)
    job.state(model)


@equal()
def frozen_before_backward(job: Job) -> None:
    """Layers are frozen between the call and its `backward()`: they get no gradients."""
    net = regression()
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*job.batch(pairs, step))
        net.net.head.requires_grad_(step != 1)
        loss.backward()
        job.gradients(model)
        optimizer.step()
    job.state(model)


@refused("RaNNCError", "create_graph", instead="leave out `create_graph=True`; finite differences of further calls")
def gradient_penalty(job: Job) -> None:
    """`torch.autograd.grad(outputs, x, ..., create_graph=True)`, as for a gradient penalty, or `loss.backward(...)`."""
    model = job.wrap(Chain(outputs=1))
    (x, _) = job.batch(pairs)
    outputs = model(x.requires_grad_()).sum()
    (gradient,) = torch.autograd.grad(outputs, x, create_graph=job.ranks > 1)
    gradient.square().mean().backward()


@refused(
    "RaNNCError",
    r"autograd.grad\(\) cannot give its gradient",
    r"loss.backward\(\)",
    "RANNC_PARTITION_NUM=1",
    settings=(STAGES,),
    instead="`loss.backward()` and `model.get_param_grad(name)`, or a plan of one Stage",
)
def gradients_of_each_task(job: Job) -> None:
    """`torch.autograd.grad(loss, params)` for the loss of each task, where other ranks hold some of the parameters."""
    net = Chain()
    out = job.wrap(net)(*job.batch(single))
    torch.autograd.grad(out.square().mean(), list(net.parameters()), retain_graph=True)


@refused("RaNNCError", "torch.func", "backward", instead="`loss.backward()`, `torch.autograd.grad(...)`")
def differentiated_forwards(job: Job) -> None:
    """The model is called inside of `torch.func.jvp`, `torch.func.grad` and the like."""
    model = job.wrap(regression())
    x, target = job.batch(pairs)
    torch.func.jvp(lambda x: model(x, target), (x,), (x,))


@refused("RaNNCError", "is_grads_batched", instead="one gradient after another")
def batched_gradients(job: Job) -> None:
    """`torch.autograd.grad(outputs, x, ..., is_grads_batched=True)`."""
    model = job.wrap(Chain(outputs=1))
    (x, _) = job.batch(pairs)
    outputs = model(x.requires_grad_())
    seeds = torch.stack([torch.ones_like(outputs), 2 * torch.ones_like(outputs)])
    torch.autograd.grad(outputs, x, seeds, is_grads_batched=True)


class _Centred(nn.Module):
    """A loss of rows around their mean, scaled by a parameter that all ranks compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = Chain(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.layers(x)
        return (self.scale * (y - y.mean(0)) - target).square().mean()


def _train(job: Job, net: nn.Module, change: Callable[[], Any] = lambda: None, factor: float = 1.0) -> None:
    """Five steps, with a change of the model or its gradients before each step of the optimizer."""
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for batch in job.batches(pairs, 5):
        optimizer.zero_grad()
        (model(*batch) * factor).backward()
        change()
        optimizer.step()


_SEEDED = "draw from a generator that all ranks seed alike"


@refused("MismatchError", "are not the same", settings=(REPLICAS,), instead=_SEEDED)
def noise_by_rank(job: Job) -> None:
    """Each rank adds noise of its own to the gradients; found out some calls later, as are the rows that follow."""
    net, drawn = _Centred(), Generator().manual_seed(job.rank)

    def add_noise() -> None:
        for param in net.parameters():
            if param.grad is not None:
                param.grad.add_(torch.randn(param.shape, generator=drawn, dtype=param.dtype), alpha=0.1)

    _train(job, net, add_noise)


@refused("MismatchError", "are not the same", settings=(REPLICAS,), instead=_SEEDED)
def values_drawn_by_rank(job: Job) -> None:
    """Parameters are initialised anew in training, from generators that the ranks have seeded each in its way."""
    net = _Centred()
    torch.manual_seed(job.rank)
    _train(job, net, lambda: nn.init.normal_(net.layers.head.weight))


@refused("MismatchError", "are not the same", settings=ONCE, instead="do so on all ranks")
def scale_changed_by_one_rank(job: Job) -> None:
    """One rank changes a parameter that all ranks hold, as one which scales what is computed of all rows."""
    net = _Centred()
    _train(job, net, lambda: net.scale.data.add_(0.1 * job.rank))


@refused("MismatchError", "are not the same", settings=(REPLICAS,), instead="do so on all ranks")
def gradients_cleared_by_one_rank(job: Job) -> None:
    """One rank clears its gradients before the step, as after a loss of its own rows that is not finite."""
    net = _Centred()
    _train(job, net, lambda: net.zero_grad(set_to_none=False) if job.rank else None)


@refused("MismatchError", "another factor on rank 1", settings=ONCE, instead="give it the same factor on all ranks")
def loss_weighted_by_rank(job: Job) -> None:
    """Each rank multiplies the loss that the model returns by a weight of its own rows."""
    _train(job, regression(), factor=1.0 + job.rank)


@refused("MismatchError", "number of the wrapped model", settings=ONCE, instead="call them in one order on all ranks")
def models_in_another_order(job: Job) -> None:
    """Two models that are built alike are called in another order on some rank, as in a loop over a set."""
    models = [job.wrap(regression()) for _ in range(2)]
    batch = job.batch(pairs)
    for model in models:
        model(*batch).backward()
    if job.ranks > 1:
        for model in reversed(models) if job.rank else models:
            model(*batch).backward()
