"""Layers and tensors of the script before and behind a model, in one optimizer with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import pyrannc
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


def _stem() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@equal()
def layers_before_and_after_the_model(job: Job) -> None:
    """What the model takes comes from layers outside of it, and what it returns goes through others; one optimizer."""
    stem, head = _stem(), nn.Linear(WIDTH, WIDTH)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(head(model(stem(x))), target, reduction="sum") / max(1, len(x))

    _between(job, Chain(), loss, *stem.parameters(), *head.parameters())


@equal()
def layers_before_a_model_with_its_loss(job: Job) -> None:
    """What a model that returns its loss takes comes from layers outside of it, which the script decays."""
    stem = _stem()

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


@equal()
def gradients_of_inputs_through_layers(job: Job) -> None:
    """Gradients of an input alone are asked for, through layers before the model (`torch.autograd.grad(loss, x)`)."""
    stem, net = _stem(), Returns(Chain(), F.mse_loss)
    model = job.wrap(net, SGD([*net.parameters(), *stem.parameters()], lr=0.1))
    for x, target in job.batches(pairs):
        (grad,) = torch.autograd.grad(model(stem(x.requires_grad_()), target), x)
        job.rows("gradient", grad)


@equal()
def learned_rows(job: Job) -> None:
    """The rows of the batch are parameters themselves, each rank's its own."""
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    for x, target in job.batches(pairs):
        latent = nn.Parameter(x)
        model(latent * 2, target).backward()
        assert latent.grad is not None
        job.rows("gradient", latent.grad)


@refused("RaNNCError", "one module", "detach", instead="one module of both, or `detach()`")
def layers_before_the_model_and_gradients_of_inputs(job: Job) -> None:
    """One backward gives both layers before the model and what goes into them gradients."""
    stem = _stem()

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(stem(x.requires_grad_())), target)

    _between(job, Chain(), loss, *stem.parameters())


@refused("RaNNCError", "use_reentrant=False", instead="`use_reentrant=False`")
def layers_before_the_model_that_compute_again(job: Job) -> None:
    """Layers before the model run in `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`."""
    stem = _stem()

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(checkpoint(stem, x.requires_grad_(), use_reentrant=True)), target)

    _between(job, Chain(), loss, *stem.parameters())


@refused("RaNNCError", "parameter of the same model", settings=(REPLICAS,), instead="compute it in the model's forward")
def own_parameter_before_the_model(job: Job) -> None:
    """The script computes what a model takes with a parameter of the same model."""
    net = Chain()
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    weight = net.layers[0].weight
    for x, target in job.batches(pairs):
        F.mse_loss(model(x @ weight), target).backward()


@refused("RaNNCError", "give it to RaNNCModule", instead="one optimizer, made first: `RaNNCModule(net, optimizer)`")
def layers_behind_in_an_optimizer_made_later(job: Job) -> None:
    """An optimizer of the model's parameters and of a layer behind it is made after the model is wrapped."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    model = job.wrap(net)
    optimizer = SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for x, target in job.batches(pairs):
        F.mse_loss(head(model(x)), target).backward()
        optimizer.step()


@equal(note="the sum over ranks, no mean: each has its share of the global batch's")
def layers_before_the_model_summed_by_the_script(job: Job) -> None:
    """The script itself sums gradients of layers before the model over ranks (`dist.all_reduce`)."""
    stem, net = _stem(), Chain()
    own = SGD(stem.parameters(), lr=0.1)
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    for x, target in job.batches(pairs):
        F.mse_loss(model(stem(x)), target).backward()
        for param in stem.parameters() if job.ranks > 1 else ():
            dist.all_reduce(param.grad)
        job.same("gradients", [param.grad for param in stem.parameters()])
        own.step()
        own.zero_grad()
    job.same("stem", list(stem.parameters()))


@equal()
def head_on_features(job: Job) -> None:
    """A layer behind the model, in its optimizer, is trained on what the model computes in `torch.no_grad()`."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    optimizer = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    model = job.wrap(net, optimizer)
    for x, target in job.batches(pairs):
        with torch.no_grad():
            features = model(x)
        optimizer.zero_grad()
        F.mse_loss(head(features), target).backward()
        job.same("gradients", [param.grad for param in head.parameters()])
        optimizer.step()
    job.same("head", list(head.parameters()))


@equal()
def head_with_a_loss_of_its_own(job: Job) -> None:
    """A layer behind the model, in its optimizer, has other losses besides, whose backwards do not reach the model."""
    head = nn.Linear(WIDTH, WIDTH)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        out = model(x)
        F.mse_loss(head(out.detach()), target).backward()
        F.mse_loss(head(out), x).backward(inputs=list(head.parameters()), retain_graph=True)
        return F.mse_loss(head(out), target)

    _between(job, Chain(), loss, *head.parameters())


@equal()
def layers_before_two_models(job: Job) -> None:
    """Two models with an optimizer each take what one layer computes, which is in the optimizer of one of them."""
    stem, first, second = _stem(), Chain(), Chain()
    optimizers = [SGD([*first.parameters(), *stem.parameters()], lr=0.1), SGD(second.parameters(), lr=0.1)]
    models = [job.wrap(net, own) for net, own in zip((first, second), optimizers, strict=True)]
    for step, (x, target) in enumerate(job.batches(pairs)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        used = models if step < 2 else models[1:]
        found = stem(x)
        torch.stack([F.mse_loss(model(found), target) for model in used]).sum().backward()
        job.same("gradients", [param.grad for param in stem.parameters()])
        for optimizer in optimizers:
            optimizer.step()
    job.same("stem", list(stem.parameters()))
    for model in models:
        job.state(model)


def _later(job: Job, add: Callable[[Optimizer, nn.Module], None], *, given: bool) -> None:
    """Trains a model, and from the second step on a layer behind it that comes to the optimizer then."""
    net = Chain()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer if given else None)
    torch.manual_seed(job.rank)
    head = nn.Linear(WIDTH, WIDTH)
    for step, (x, target) in enumerate(job.batches(pairs, steps=4)):
        optimizer.zero_grad()
        if step == 1:
            add(optimizer, head)
        F.mse_loss(head(model(x)) if step else model(x), target).backward()
        optimizer.step()
    job.same("head", list(head.parameters()))
    job.state(model)


@equal()
def layers_behind_added_later(job: Job) -> None:
    """A layer behind the model, which ranks have drawn otherwise, comes to its optimizer later (`add_param_group`)."""
    _later(job, lambda optimizer, head: optimizer.add_param_group({"params": head.parameters()}), given=True)


@equal()
def layers_behind_added_to_an_optimizer_of_later(job: Job) -> None:
    """As above, and `RaNNCModule` was not given the optimizer."""
    _later(job, lambda optimizer, head: optimizer.add_param_group({"params": head.parameters()}), given=False)


@equal()
def layers_behind_listed_later_by_hand(job: Job) -> None:
    """A layer behind the model, the same on all ranks, is appended to `param_groups` by hand."""

    def add(optimizer: Optimizer, head: nn.Module) -> None:
        torch.manual_seed(9)
        for param in head.parameters():
            nn.init.normal_(param)
        optimizer.param_groups[0]["params"] += head.parameters()

    _later(job, add, given=True)


@refused("RaNNCError", "different shares", settings=(REPLICAS,), instead="`backward()` of each loss by itself")
def two_shares_in_one_backward(job: Job) -> None:
    """One backward comes by two calls in which ranks have other shares of the batch, and by a layer behind them."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    model = job.wrap(net, SGD([*net.parameters(), *head.parameters()], lr=0.1))
    for x, target in job.batches(pairs):
        fewer = x[: 2 + job.rank]
        (F.mse_loss(head(model(x)), target) + head(model(fewer)).square().mean()).backward()


@refused("RaNNCError", "hook", "put the layer into the model", instead="change `.grad` after `backward()`")
def hook_on_layers_behind_the_model(job: Job) -> None:
    """A layer behind the model, in its optimizer, clamps its gradient in a hook."""
    head = nn.Linear(WIDTH, WIDTH)
    head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    _between(job, Chain(), lambda model, x, target: F.mse_loss(head(model(x)), target), *head.parameters())


@refused("MismatchError", "beside the model", "not the same", instead="`loss.backward()`, or average what is asked for")
def gradients_of_layers_behind_asked_for(job: Job) -> None:
    """A layer behind the model, in its optimizer, gets what the script asks for with `torch.autograd.grad`."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    optimizer = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    model = job.wrap(net, optimizer)
    params = list(head.parameters())
    for x, target in job.batches(pairs, steps=8):
        found = torch.autograd.grad(F.mse_loss(head(model(x)), target), params)
        for param, grad in zip(params, found, strict=True):
            param.grad = grad
        optimizer.step()


def _with_head(job: Job) -> tuple[nn.Module, nn.Module, Optimizer]:
    """A model, a layer behind it, and the optimizer of both."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    optimizer = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    return job.wrap(net, optimizer), head, optimizer


@refused("RaNNCError", "shares of the batch", settings=(REPLICAS,), instead="as many rows in each call")
def head_on_features_kept(job: Job) -> None:
    """A layer behind the model is trained on features of former calls, in the last of which ranks had other rows."""
    model, head, _ = _with_head(job)
    x, target = job.batch(pairs)
    with torch.no_grad():
        kept = model(x)
        model(x[: 2 + job.rank])
    F.mse_loss(head(kept), target).backward()


def _train_on_kept(job: Job) -> None:
    """A call makes features, of which each step takes some."""
    model, head, optimizer = _with_head(job)
    x, target = job.batch(pairs)
    with torch.no_grad():
        features = model(x)
    for part in range(2):
        optimizer.zero_grad()
        F.mse_loss(head(features[part::2]), target[part::2]).backward()
        job.same("gradients", [param.grad for param in head.parameters()])
        optimizer.step()


@equal(settings=(STAGES,), note="a rank's loss weighs as its rows in the last call of a model")
def head_on_parts_of_features(job: Job) -> None:
    """A layer behind the model, in its optimizer, takes several steps on features of one call."""
    _train_on_kept(job)


@equal(settings=(STAGES,))
def head_on_features_after_another_model(job: Job) -> None:
    """The same after a model that was called with other rows, and taken back by `undeploy()`."""
    model, _, _ = _with_head(job)
    x, _ = job.batch(pairs)
    with torch.no_grad():
        model(x[: 2 + job.rank])
    if isinstance(model, pyrannc.RaNNCModule):
        model.undeploy()
    _train_on_kept(job)


@refused("RaNNCError", "rows", "each", settings=(Setting((6, 2), 1, 2),), instead="a call of a model for each step")
def head_on_parts_of_uneven_features(job: Job) -> None:
    """As above, and ranks have brought different numbers of rows to that call."""
    _train_on_kept(job)


@equal()
def layers_behind_replaced_by_hand(job: Job) -> None:
    """A parameter behind the model is replaced, in its layer and in the optimizer's list, at the same place."""
    net, head = Chain(), nn.Linear(WIDTH, WIDTH)
    optimizer = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    model = job.wrap(net, optimizer)
    for step, (x, target) in enumerate(job.batches(pairs, steps=4)):
        optimizer.zero_grad()
        if step == 2:
            old, head.weight = head.weight, nn.Parameter(head.weight.detach() * 2)
            listed = optimizer.param_groups[0]["params"]
            listed[next(place for place, param in enumerate(listed) if param is old)] = head.weight
        F.mse_loss(head(model(x)), target).backward()
        optimizer.step()
    job.same("head", list(head.parameters()))
