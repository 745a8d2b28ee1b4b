"""Layers of the script before and behind a model that average their gradients by themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import MIXED, REPLICAS, STAGES
from tests.contract.training import WIDTH, Chain, pairs

from .beside import _between, _stem


def _in_ddp(job: Job, net: nn.Module, **options: object) -> nn.Module:
    return DistributedDataParallel(net, **options) if job.ranks > 1 else net


def _trained(job: Job, stem: nn.Module, layers: Callable[[Tensor], Tensor], **options: object) -> None:
    """Trains layers with an optimizer of their own, before a model with another."""
    net, own = Chain(), SGD(stem.parameters(), lr=0.1)
    model = job.wrap(net, SGD(net.parameters(), lr=0.1), **options)
    for x, target in job.batches(pairs):
        F.mse_loss(model(layers(x)), target).backward()
        job.same("gradients", [param.grad for param in stem.parameters()])
        own.step()
        own.zero_grad()
    job.same("stem", list(stem.parameters()))
    job.state(model)


@equal()
def layers_in_ddp_before_the_model(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel`, and in an optimizer of their own."""
    stem = _stem()
    _trained(job, stem, _in_ddp(job, stem))


@equal()
def layers_in_ddp_from_the_second_step_on(job: Job) -> None:
    """Layers before the model come into `DistributedDataParallel` after a first step of them, and leave it again."""
    stem, wrapped = _stem(), list[nn.Module]()

    def layers(x: Tensor) -> Tensor:
        wrapped.append(_in_ddp(job, stem))
        return wrapped[-1](x)  # type: ignore[no-any-return]

    net = Chain()
    model = job.wrap(net, SGD(net.parameters(), lr=0.1))
    for step, (x, target) in enumerate(job.batches(pairs, steps=4)):
        taken = layers(x) if 0 < step < 3 else stem(x)
        F.mse_loss(model(taken), target).backward()
        if 0 < step < 3:
            job.same("gradients", [param.grad for param in stem.parameters()])
        wrapped.clear()
        stem.zero_grad()


@equal()
def layers_in_ddp_and_in_the_optimizer_of_the_model(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel`, and in one optimizer with it."""
    stem = _stem()
    layers = _in_ddp(job, stem, gradient_as_bucket_view=True)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(model(layers(x)), target, reduction="sum") / max(1, len(x))

    _between(job, Chain(), loss, *stem.parameters())


@equal((STAGES,))
def layers_in_ddp_behind_the_model(job: Job) -> None:
    """A layer behind the model is in `DistributedDataParallel`, and in one optimizer with it; ranks have equal rows."""
    head = nn.Linear(WIDTH, WIDTH)
    layers = _in_ddp(job, head)
    _between(job, Chain(), lambda model, x, target: F.mse_loss(layers(model(x)), target), *head.parameters())


@refused("RaNNCError", "leave", "out", settings=(REPLICAS, MIXED), instead="leave it out: RaNNC averages by rows")
def layers_in_ddp_behind_the_model_with_uneven_rows(job: Job) -> None:
    """As above, and ranks have different numbers of rows."""
    head = nn.Linear(WIDTH, WIDTH)
    layers = _in_ddp(job, head)

    def loss(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(layers(model(x)), target, reduction="sum") / max(1, len(x))

    _between(job, Chain(), loss, *head.parameters())


@refused("RaNNCError", "use_reentrant=False", instead="`use_reentrant=False`")
def layers_in_ddp_that_compute_again(job: Job) -> None:
    """Layers before the model are in `DistributedDataParallel`, and run in `checkpoint(..., use_reentrant=True)`."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _stem()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]

    stem = Again()
    layers = _in_ddp(job, stem)
    _trained(job, stem, lambda x: layers(x.requires_grad_()))


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
        if job.ranks > 1 and not isinstance(stem, DistributedDataParallel):
            stem = DistributedDataParallel(stem, process_group=dist.new_subgroups(1)[0])
        F.mse_loss(model(stem(x)), target).backward()
