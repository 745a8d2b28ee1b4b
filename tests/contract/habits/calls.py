"""Who calls what: all ranks, rank 0 alone, one that stops early."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Thread
from time import sleep
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import pyrannc
from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import ONCE, REPLICAS, STAGES
from tests.contract.training import WIDTH, Chain, Returns, adam, chain_with_loss, learn, learn_around, pairs, single

ALL_RANKS = "call it on all ranks, outside of `if rank == 0`"


def _learned(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    return model, optimizer


@equal()
def saved_by_rank_0(job: Job) -> None:
    """All ranks call `model.state_dict()`, rank 0 saves it."""
    model, _ = _learned(job)
    saved = model.state_dict()
    if job.rank == 0:
        torch.save(saved, "/dev/null")
    job.state(model)


class _Density(Chain):
    """A model that scripts train by another method than its forward."""

    def log_prob(self, x: Tensor) -> Tensor:
        return -self(x).square().sum(1)


@refused("RaNNCError", "was never called", "forward", instead="have `forward` do it, and call `model(...)`")
def method_trained_alone(job: Job) -> None:
    """The loop calls a method of the model alone, such as `model.log_prob(x)`, and never `model(...)`."""
    net = _Density()
    optimizer = SGD(net.parameters(), lr=0.1)
    model: Any = job.wrap(net, optimizer)
    (-model.log_prob(*job.batch(single)).sum()).backward()
    optimizer.step()


@equal()
def part_wrapped_after_training_has_begun(job: Job) -> None:
    """A part of a model that is being trained is wrapped too, and not called yet, while training goes on."""
    net = chain_with_loss()
    wrapped: list[nn.Module] = []
    learn_around(job, net, lambda model: wrapped.append(job.wrap(net.net)))


@equal()
def state_made_before_the_first_call(job: Job) -> None:
    """The optimizer makes its state before the first call, by a step with gradients of zeros and a rate of 0."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused("PeerError", "rank 0 waits in state_dict", "by all ranks", settings=(STAGES,), instead=ALL_RANKS, apart=True)
def state_by_rank_0_alone(job: Job) -> None:
    """`if rank == 0: torch.save(model.state_dict(), file)`, and training goes on."""
    model, optimizer = _learned(job)
    if job.rank == 0:
        model.state_dict()
    learn(job, model, optimizer, step=1)


@refused("PeerError", "rank 0 waits in get_param", "by all ranks", settings=(STAGES,), instead=ALL_RANKS, apart=True)
def parameter_by_rank_0_alone(job: Job) -> None:
    """`if rank == 0: model.get_param(name)`, and training goes on."""
    model, optimizer = _learned(job)
    if job.rank == 0 and isinstance(model, pyrannc.RaNNCModule):
        model.get_param("net.head.weight")
    learn(job, model, optimizer, step=1)


@refused(
    "MismatchError",
    "by calls of its own",
    "Call what RaNNCModule has made",
    settings=(REPLICAS,),
    instead="call what `RaNNCModule` has made",
)
def trained_by_calls_of_the_plain_model(job: Job) -> None:
    """After the first calls the loop calls the wrapped model itself, which trains each Replica alone, and saves it."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    for x, target in job.batches(pairs):
        optimizer.zero_grad()
        net(x, target).backward()
        optimizer.step()
    model.state_dict()


@refused(
    "RaNNCError", "on thread", "one thread", settings=(REPLICAS,), instead="make all calls on one thread", apart=True
)
def called_by_two_threads(job: Job) -> None:
    """A thread evaluates the model while the loop trains it."""
    model, optimizer = _learned(job)

    def evaluate() -> None:
        with torch.no_grad():
            model(*job.batch(pairs))

    if job.rank == 0:
        Thread(target=evaluate, daemon=True).start()
    # The thread waits in its call for the other ranks.
    sleep(1 if job.rank == 0 else 3)
    learn(job, model, optimizer, step=1)


@equal()
def evaluated_by_a_thread(job: Job) -> None:
    """A thread evaluates the model, and the loop waits for it (`ThreadPoolExecutor`, `thread.join()`)."""
    model, optimizer = _learned(job)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            loss: torch.Tensor = model(*job.batch(pairs, 1))
        return loss

    with ThreadPoolExecutor(1) as pool:
        job.same("loss", pool.submit(evaluate).result())
    learn(job, model, optimizer, step=2)
    job.state(model)


@refused("MismatchError", "in evaluation mode", instead=ALL_RANKS)
def evaluation_by_rank_0_alone(job: Job) -> None:
    """Rank 0 alone evaluates the model, the others go on with training."""
    net = Chain()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for x, target in job.batches(pairs):
        model.train()
        out = model(x)
        job.rows("output", out)
        ((out - target).square().sum() / max(1, len(x))).backward()
        optimizer.step()
        if job.rank == 0:
            model.eval()
            with torch.no_grad():
                model(x)


@equal()
def evaluation_by_all(job: Job) -> None:
    """All ranks evaluate, each on its own rows, some on none."""
    model, optimizer = _learned(job)
    model.eval()
    with torch.no_grad():
        job.same("evaluated", model(*job.batch(pairs, 7)))
    model.train()
    learn(job, model, optimizer, step=1)
    job.state(model)


@refused("MismatchError", "different shapes|lengths", "pad", instead="pad to a length that all ranks agree on")
def lengths_differ_between_ranks(job: Job) -> None:
    """Each rank pads its batch to its own longest row."""
    model = job.wrap(Returns(Chain(), lambda y: y.mean(1)))
    (x,) = job.batch(single)
    model(x[:, None].repeat(1, 3, 1))
    model(x[:, None].repeat(1, 3 + job.rank, 1))


@equal()
def lengths_differ_between_steps(job: Job) -> None:
    """The length of rows changes from step to step, the same on all ranks."""
    model = job.wrap(Returns(Chain(), lambda y: y.square().mean()))
    for length, (x,) in zip((2, 3, 2), job.batches(single), strict=True):
        loss = model(x[:, None].repeat(1, length, 1))
        job.same("loss", loss)
        loss.backward()
    job.gradients(model)


@refused("MismatchError", "different models", instead="build the same model on all ranks")
def models_differ(job: Job) -> None:
    """Ranks build different models."""
    job.wrap(Chain(3 + job.rank))(*job.batch(single))


class _Projected(Chain):
    """Draws a projection that it does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.projection)


@refused(
    "MismatchError",
    "no buffer",
    "matmul",
    "same seed",
    instead="`self.register_buffer(...)`, or one seed for all ranks",
)
def tensors_drawn_differently(job: Job) -> None:
    """Ranks have different seeds, and the model has drawn a tensor that it keeps as a plain attribute."""
    torch.manual_seed(job.rank)
    job.wrap(_Projected())(*job.batch(single))


@refused("PeerError", "rank 1 has left", settings=(STAGES,), instead="stop on all ranks in the same step", apart=True)
def one_rank_stops_early(job: Job) -> None:
    """One rank leaves the loop before the others, as by a stop criterion of its own rows."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(4):
        learn(job, model, optimizer, step=step)
        if job.rank == 1 and step == 1:
            return


@equal()
def seeds_differ(job: Job) -> None:
    """Ranks build the model with different seeds: rank 0's parameters count."""
    torch.manual_seed(job.rank)
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    job.state(model)


@refused("MismatchError", "gradients", settings=ONCE, instead="the same on all ranks")
def gradients_off_on_one_rank(job: Job) -> None:
    """One rank calls the model under `torch.no_grad()`."""
    model, _ = _learned(job)
    with torch.set_grad_enabled(job.rank == 0):
        model(*job.batch(pairs, 1))


@equal()
def reduction_delayed(job: Job) -> None:
    """`pyrannc.delay_grad_allreduce(True)` for the first of two batches, set before its call."""
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(net)
    pyrannc.delay_grad_allreduce(True)
    model(*job.batch(pairs, 0)).backward()
    pyrannc.delay_grad_allreduce(False)
    model(*job.batch(pairs, 1)).backward()
    job.gradients(model)


@equal()
def reduction_left_out_by_no_sync(job: Job) -> None:
    """`with model.no_sync():` around the first of two batches, as with `DistributedDataParallel`."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    with model.no_sync() if isinstance(model, pyrannc.RaNNCModule) else nullcontext():
        model(*job.batch(pairs, 0)).backward()
    model(*job.batch(pairs, 1)).backward()
    job.gradients(model)


@equal()
def reduction_switched_before_backward(job: Job) -> None:
    """`pyrannc.delay_grad_allreduce` is set between the call and `backward()`, as with RaNNC 0.7.5."""
    model = job.wrap(Chain())
    for step, delayed in enumerate((True, False)):
        x, target = job.batch(pairs, step)
        out = model(x)
        pyrannc.delay_grad_allreduce(delayed)
        ((out - target).square().sum() / max(1, len(x))).backward()
    job.gradients(model)


@equal()
def reduction_switched_before_backward_of_a_loss_inside(job: Job) -> None:
    """As above, and the loss is inside of the model, whose gradients are summed already."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    for step, delayed in enumerate((True, False, True, True, False)):
        loss = model(*job.batch(pairs, step))
        pyrannc.delay_grad_allreduce(delayed)
        loss.backward(retain_graph=step == 2)
        if step == 2:
            loss.backward()
    job.gradients(model)


@equal()
def reduction_delayed_and_clipped(job: Job) -> None:
    """Gradients that are not summed yet are clipped (`model.clip_grad_norm`) and read, and summed then."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    pyrannc.delay_grad_allreduce(True)
    for step in range(2):
        model(*job.batch(pairs, step)).backward()
    if job.ranks > 1:
        model.clip_grad_norm(0.01)  # type: ignore[operator]  # RaNNC's
        model.allreduce_grads()  # type: ignore[operator]  # likewise
    else:
        nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    job.gradients(model)
    pyrannc.delay_grad_allreduce(False)
    optimizer.step()
    job.state(model)


@equal()
def layers_frozen_between_delayed_backwards(job: Job) -> None:
    """Reduction is delayed, and a layer is frozen between two backwards that add up."""
    net = Returns(Chain(), F.mse_loss)
    model = job.wrap(net)
    pyrannc.delay_grad_allreduce(True)
    for step in range(3):
        model(*job.batch(pairs, step)).backward()
        net.net.layers[0].requires_grad_(False)
    if job.ranks > 1:
        model.allreduce_grads()  # type: ignore[operator]  # RaNNC's
    pyrannc.delay_grad_allreduce(False)
    job.gradients(model)


@refused("RaNNCError", "allreduce_grads", instead="`model.allreduce_grads()` before the step")
def step_before_the_reduction(job: Job) -> None:
    """`optimizer.step()` while gradients are not summed, after `delay_grad_allreduce(True)`."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    pyrannc.delay_grad_allreduce(True)
    model(*job.batch(pairs)).backward()
    optimizer.step()


def _scaled_late(job: Job, *, early: bool) -> None:
    """Gradients of two batches are summed, and unscaled before or after that; those of the first overflow."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        pyrannc.delay_grad_allreduce(True)
        for part in range(2):
            x, target = job.batch(pairs, 2 * step + part)
            scaler.scale(model(x + math.inf if step + part == 0 and job.rank == 0 else x, target)).backward()
        if early:
            scaler.unscale_(optimizer)
        if job.ranks > 1:
            model.allreduce_grads()  # type: ignore[operator]  # RaNNC's
        if not early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        job.same("scale", scaler.get_scale())
        optimizer.zero_grad()
    pyrannc.delay_grad_allreduce(False)
    job.state(model)


@equal()
def reduction_delayed_and_scaled(job: Job) -> None:
    """Reduction is delayed under `torch.amp.GradScaler`, and `model.allreduce_grads()` comes before `unscale_`."""
    _scaled_late(job, early=False)


@refused("RaNNCError", "unscale_", "allreduce_grads", instead="`model.allreduce_grads()` before it")
def unscaled_before_the_reduction(job: Job) -> None:
    """`scaler.unscale_(optimizer)` while gradients are not summed, after `delay_grad_allreduce(True)`."""
    _scaled_late(job, early=True)


@equal()
def reduction_asked_for_again(job: Job) -> None:
    """The script calls `model.allreduce_grads()` before each step, though nothing was delayed."""
    net = Chain()
    model = job.wrap(net)
    for step in range(2):
        x, target = job.batch(pairs, step)
        ((model(x) - target).square().sum() / max(1, len(x))).backward()
        for _ in range(2 if job.ranks > 1 else 0):
            model.allreduce_grads()  # type: ignore[operator]  # RaNNC's
    job.gradients(model)
