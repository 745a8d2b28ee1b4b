"""Layers and tensors of the script before and behind a model, in one optimizer with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

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


def _in_ddp(job: Job, net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net) if job.ranks > 1 else net


@equal()
def layers_in_ddp_before_the_model(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel`, and in an optimizer of their own."""
    stem, net = _stem(), Chain()
    layers, own = _in_ddp(job, stem), SGD(stem.parameters(), lr=0.1)
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    for x, target in job.batches(pairs):
        F.mse_loss(model(layers(x)), target).backward()
        job.same("gradients", [param.grad for param in stem.parameters()])
        own.step()
        own.zero_grad()
    job.same("stem", list(stem.parameters()))


@equal()
def layers_in_ddp_and_in_the_optimizer_of_the_model(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel`, and in one optimizer with it."""
    stem = _stem()
    layers = _in_ddp(job, stem)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(layers(x)), target, reduction="sum") / max(1, len(x))

    _between(job, Chain(), loss, *stem.parameters())


@refused("RaNNCError", "FSDP", "optimizer that you give", instead="leave them as they are, in one optimizer with it")
def layers_in_fsdp_before_the_model(job: Job) -> None:
    """Layers before the model are in `fully_shard`."""
    stem, net = _stem(), Chain()
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    if job.ranks > 1:
        fully_shard(stem)
    for x, target in job.batches(pairs):
        F.mse_loss(model(stem(x)), target).backward()


@refused("RaNNCError", "some of the ranks", instead="a group of all ranks")
def layers_in_ddp_of_some_ranks(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel` over some of the ranks."""
    stem, net = _stem(), Chain()
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    for x, target in job.batches(pairs):
        if job.ranks > 1 and not isinstance(stem, nn.parallel.DistributedDataParallel):
            stem = nn.parallel.DistributedDataParallel(stem, process_group=dist.new_subgroups(1)[0])
        F.mse_loss(model(stem(x)), target).backward()


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
