"""What else stands round or inside of a model: compilers, other wrappers, scripted parts, precision, old settings."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import pyrannc
from tests.contract.habit import equal, refused, warned
from tests.contract.job import Job
from tests.contract.settings import ONCE
from tests.contract.training import (
    WIDTH,
    Chain,
    OnPositive,
    Returns,
    chain_with_loss,
    fit,
    learn,
    learn_around,
    pairs,
    single,
)


def _learn(job: Job, net: nn.Module, **options: Any) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, **options)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@warned("torch.compile", settings=ONCE, instead="leave out `torch.compile`: Stages run as they are")
def compiled(job: Job) -> None:
    """The model is given to `torch.compile` before it is wrapped."""
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(torch.compile(net, backend="eager") if job.ranks > 1 else net)
    for batch in job.batches(pairs):
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()


@equal(note="the model runs as it does otherwise, the script's own operators are compiled")
def compiled_after_wrapping(job: Job) -> None:
    """What `RaNNCModule` has made is given to `torch.compile`, as is a function that calls it and `backward()`."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    compiled_model = torch.compile(model, backend="eager")

    @torch.compile(backend="eager")
    def differentiated(x: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = model(torch.sin(x), target)
        loss.backward()
        return loss

    for step in range(4):
        optimizer.zero_grad()
        batch = job.batch(pairs, step)
        if step % 2:
            job.same("loss", differentiated(*batch).detach())
        else:
            loss = compiled_model(*batch)
            job.same("loss", loss)
            loss.backward()
        optimizer.step()
    job.state(model)


@refused("RaNNCError|CaptureError", "DistributedDataParallel", instead="leave it out: RaNNC takes its place")
def wrapped_in_ddp(job: Job) -> None:
    """The model is wrapped in `DistributedDataParallel` before."""
    net: nn.Module = Returns(Chain(), F.mse_loss)
    if job.ranks > 1:
        net = nn.parallel.DistributedDataParallel(net)
    job.wrap(net)(*job.batch(pairs))


@refused("RaNNCError", "already", instead="wrap it once")
def wrapped_twice(job: Job) -> None:
    """The model is a `RaNNCModule` already."""
    job.wrap(job.wrap(Returns(Chain(), F.mse_loss)))


@equal()
def default_device(job: Job) -> None:
    """All of the script runs under `torch.device(...)`, or after `torch.set_default_device(...)`."""
    batches = [*job.batches(pairs)]
    with batches[0][0].device:
        net = Returns(Chain(), F.mse_loss)
        optimizer = Adam(net.parameters(), lr=0.01)
        model = job.wrap(net, optimizer)
        for batch in batches:
            optimizer.zero_grad()
            model(*batch).backward()
            job.gradients(model)
            optimizer.step()
        job.state(model)


@equal()
def inference_mode_first(job: Job) -> None:
    """The first call is under `torch.inference_mode()`; training follows."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    with torch.inference_mode():
        job.same("first", model(*job.batch(pairs, 7)))
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@warned("deployed anew", instead="make a training call the first one, to plan once only")
def auxiliary_head_trained_only(job: Job) -> None:
    """The first call is in evaluation mode, and a head is used in training only."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.aux, self.last = Chain(3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            hidden = self.chain(x)
            loss = F.mse_loss(self.last(torch.tanh(hidden)), target)
            return loss + 0.3 * F.mse_loss(self.aux(hidden), target) if self.training else loss

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    model.eval()
    with torch.no_grad():
        job.same("evaluated", model(*job.batch(pairs, 7)))
    model.train()
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain, self.first, self.second = Chain(3), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor, heads: str) -> Tensor:
        hidden = self.chain(x)
        made = [getattr(self, head)(hidden) for head in heads.split()]
        return F.mse_loss(sum(made), target)


@warned("deployed anew", instead="make the call that uses most the first one, to plan once only")
def head_used_later(job: Job) -> None:
    """A head is used from the second call on; gradients of both calls add up, and the optimizer has a state."""
    net = _TwoHeads()
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    for step, heads in enumerate(("first", "first", "first second", "first", "first second")):
        model(*job.batch(pairs, step), heads).backward()
        job.gradients(model)
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    job.state(model)


@refused("PlanError", "make the first call one that uses all", instead="compute both, and choose with `torch.where`")
def heads_used_in_turn(job: Job) -> None:
    """One call uses one head, the next call another one."""
    model = job.wrap(_TwoHeads())
    for step, heads in enumerate(("first", "second")):
        model(*job.batch(pairs, step), heads).backward()
        job.gradients(model)


@equal()
def leaf_modules(job: Job) -> None:
    """A sub-module with shapes that depend on data stays whole by `RaNNCModule(..., leaf_modules=[...])`."""
    net = Chain()
    net.layers[1] = OnPositive()
    _learn(job, Returns(net, F.mse_loss), leaf_modules=["net.layers.1"])


@torch.jit.script
def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@torch.jit.script
def _over_rows(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        out[row] = x[row] * 2
    return out


@equal()
def scripted_function(job: Job) -> None:
    """The model calls a function made by `torch.jit.script`."""
    _learn(job, Returns(Chain(), lambda y, target: F.mse_loss(_gelu(y), target)))


@equal()
def scripted_loop_over_rows(job: Job) -> None:
    """The model calls a function made by `torch.jit.script` that loops over rows."""
    _learn(job, Returns(Chain(), lambda y, target: F.mse_loss(_over_rows(y), target)))


@equal()
def scripted_module(job: Job) -> None:
    """A sub-module is made by `torch.jit.script`."""
    net = Chain()
    net.layers[1] = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    _learn(job, Returns(net, F.mse_loss))


_OLD_ITEMS = {
    "DECOMPOSER": "ml_part",
    "REPLICA_NUM": "0",
    "CHECKPOINTING": "false",
    "DO_UNCOARSENING": "true",
    "DUMP_GRAPH_PREFIX": "",
    "RUN_WATCHDOG": "false",
    "PROFILER_CACHE_SIZE": "10",
}


@warned("decomposer", "run_watchdog", settings=ONCE, instead="leave them out")
def old_configuration(job: Job) -> None:
    """Configuration items of RaNNC 0.7.5 are set."""
    os.environ.update({f"RANNC_{name}": value for name, value in _OLD_ITEMS.items()})
    try:
        _learn(job, Returns(Chain(), F.mse_loss))
    finally:
        for name in _OLD_ITEMS:
            del os.environ[f"RANNC_{name}"]


@refused("ConfigError", "RANNC_PARTITON_NUM", "RANNC_PARTITION_NUM", settings=ONCE, instead="the item that is meant")
def misspelt_configuration(job: Job) -> None:
    """A configuration item is misspelt."""
    os.environ["RANNC_PARTITON_NUM"] = "2"
    try:
        job.wrap(Chain())
    finally:
        del os.environ["RANNC_PARTITON_NUM"]


@equal(settings=ONCE)
def old_arguments(job: Job) -> None:
    """Arguments of RaNNC 0.7.5: `get_param(name, amp_master_param)`, `get_param_grad(name, amp_master_grad)`."""
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(net)
    model(*job.batch(pairs)).backward()
    weight = net.net.head.weight
    old = isinstance(model, pyrannc.RaNNCModule)
    job.same("weight", model.get_param("net.head.weight", False) if old else weight)
    job.same("gradient", model.get_param_grad("net.head.weight", False) if old else weight.grad)


@refused("RaNNCError", "apex", "torch.autocast", settings=ONCE, instead="leave it out")
def apex(job: Job) -> None:
    """`RaNNCModule(..., enable_apex_amp=True)`."""
    job.wrap(Chain(), enable_apex_amp=True)


@equal()
def zero(job: Job) -> None:
    """`RaNNCModule(..., enable_zero=True)`."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer, enable_zero=True)
    for step in range(3):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused("CaptureError", "number computed from the batch size", instead="return a tensor, or count rows in the script")
def number_of_rows_returned(job: Job) -> None:
    """The model returns `x.shape[0]`."""
    job.wrap(Returns(Chain(), lambda y: (y, y.shape[0])))(*job.batch(single))


@refused("CaptureError", "batch size", instead="take the extent from `x.shape[0]`")
def one_batch_size_only(job: Job) -> None:
    """The model works for one batch size only (`x.view(8, ...)`)."""
    (x,) = job.batch(single)
    rows = len(x)
    job.wrap(Returns(Chain(), lambda y: y.reshape(rows, 2, WIDTH // 2)))(x)


@equal()
def undeployed_and_wrapped_again(job: Job) -> None:
    """`model.undeploy()`, then the model is called again."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
        if isinstance(model, pyrannc.RaNNCModule):
            model.undeploy()
    job.state(net)


@equal()
def criterion_with_parameters(job: Job) -> None:
    """The model ends in a criterion module with its own parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.temperature = Chain(), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(self.chain(x) / self.temperature, target)

    fit(job, Net(), pairs)


@refused("CaptureError", "asks for the number of ranks", instead="leave it out")
def forward_that_counts_the_ranks(job: Job) -> None:
    """The forward multiplies its loss by `dist.get_world_size()`."""
    net = Returns(Chain(), lambda out, target: F.mse_loss(out, target) * dist.get_world_size())
    job.wrap(net)(*job.batch(pairs))


@equal(note="a number made of its `WORLD_SIZE` is refused")
def forward_that_logs_the_environment(job: Job) -> None:
    """The forward hands on all environment variables, to a log or another program: `dict(os.environ)`."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        logging.getLogger(__name__).debug("running with %s", dict(os.environ))
        return F.mse_loss(out, target)

    _learn(job, Returns(Chain(), loss))


@refused("CaptureError", "talks with other ranks", instead="leave it out: the rows of all ranks are there")
def forward_that_gathers_rows(job: Job) -> None:
    """The forward gathers features of all ranks (`all_gather`), as contrastive losses do under DDP."""

    def loss(out: Tensor, target: Tensor) -> Tensor:
        gathered = [torch.empty_like(out) for _ in range(job.ranks)]
        dist.all_gather(gathered, out)
        return F.mse_loss(out, target) + torch.cat(gathered).mean()

    job.wrap(Returns(Chain(), loss))(*job.batch(pairs))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


_summed: Any = _Summed.apply


@refused("CaptureError", "talks with other ranks", instead="leave it out: gradients are those of the global batch")
def backward_that_sums_over_ranks(job: Job) -> None:
    """The backward of an `autograd.Function` sums gradients over the ranks, as `all_gather` with gradients does."""

    job.wrap(Returns(Chain(), lambda out, target: F.mse_loss(_summed(out), target)))(*job.batch(pairs))


@refused("CaptureError", "talks with other ranks", instead="leave it out: gradients are those of the global batch")
def later_backward_that_sums_over_ranks(job: Job) -> None:
    """The same in a part that the model takes only after some steps."""

    class Net(Chain):
        sums = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return _summed(y) if self.sums else y

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "sums", True))


@refused("CaptureError", "talks with other ranks", instead="leave it out: gradients are those of the global batch")
def later_hook_that_sums_over_ranks(job: Job) -> None:
    """Likewise a hook of gradients (`x.register_hook`), by an operator of torch (`torch.ops`)."""

    def summed(gradient: Tensor) -> Any:
        world: Any = dist.group.WORLD
        return torch.ops._c10d_functional.all_reduce.default(gradient, "sum", world.group_name)

    class Net(Chain):
        sums = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.sums:
                y.register_hook(summed)
            return y

    net = Net()
    learn_around(job, Returns(net, F.mse_loss), lambda model: setattr(net, "sums", True))
