"""What comes between steps: settings that change, gradients that are cleared, what only one rank does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import NOT_WHOLE, ONCE, REPLICAS, STAGES, Setting
from tests.contract.training import adam, chain_with_loss, learn, pairs


@refused("MismatchError", '"weight_decay" of group 0', settings=ONCE, instead="give every rank the same value")
def decay_by_rank(job: Job) -> None:
    """The script changes `weight_decay`, betas or momentum on one rank."""
    net = chain_with_loss()
    optimizer = AdamW(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.1 + job.rank
    if job.ranks == 1:
        return
    learn(job, model, optimizer, step=1)


@refused("MismatchError", '"lr" of group 0', settings=ONCE, instead="give every rank the same value")
def rate_in_a_tensor_by_rank(job: Job) -> None:
    """The learning rate is a tensor, and the script changes it in place on one rank."""
    net = chain_with_loss()
    optimizer = AdamW(net.parameters(), lr=torch.tensor(0.01))
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(0.01 * (1 + job.rank))
    if job.ranks == 1:
        return
    learn(job, model, optimizer, step=1)


@equal()
def rate_warmed_up_from_zero(job: Job) -> None:
    """A schedule starts with a learning rate of 0."""
    net = chain_with_loss()
    optimizer = adam(net)
    scheduler = LambdaLR(optimizer, lambda step: step / 4)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
        scheduler.step()
    job.state(model)


@equal((REPLICAS, Setting((3, 0, 5), 1, 4)), note="where every rank holds the whole model")
def average_in_a_hook_after_the_step(job: Job) -> None:
    """`optimizer.register_step_post_hook(...)`, before the first call, with an average of `net.parameters()`."""
    net = chain_with_loss()
    optimizer = adam(net)
    average = [param.detach().clone() for param in net.parameters()]

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        job.same("listed", [len(group["params"]) for group in optimizer.param_groups])
        for mean, param in zip(average, net.parameters(), strict=True):
            mean.lerp_(param.detach(), 0.5)

    optimizer.register_step_post_hook(hook)
    model = job.wrap(net, optimizer)
    for step in range(3):
        learn(job, model, optimizer, step=step)
        job.same("average", average)


@equal()
def frozen_with_gradients(job: Job) -> None:
    """Layers are frozen while they have gradients, with which the optimizer goes on as torch has it."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    first = net.net.layers[0].requires_grad_(False)
    for step, set_to_none in enumerate((None, False)):
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        model(*job.batch(pairs, step)).backward()
        job.gradients(model)
        optimizer.step()
        job.state(model)
    first.requires_grad_(True)
    model(*job.batch(pairs, 3)).backward()
    job.gradients(model)
    optimizer.step()
    job.state(model)


@equal()
def weight_decay_by_gradients(job: Job) -> None:
    """The script adds each parameter to its gradient (`param.grad.add_(param, alpha=0.1)`) before a step."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(*job.batch(pairs, step)).backward()
        with torch.no_grad():
            for param in net.parameters():
                param.grad.add_(param, alpha=0.1)
        job.gradients(model)
        optimizer.step()
    job.state(model)


@equal((REPLICAS, STAGES, *(Setting((3, 0, 5), 1, 2, level) for level in "123")))
def steps_compiled(job: Job) -> None:
    """`step = torch.compile(optimizer.step)`, which the loop calls."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        optimizer.zero_grad()
        model(*job.batch(pairs, number)).backward()
        step()
    job.state(model)


@refused("MismatchError", "optimizer.step", instead="decide by what is equal on all ranks")
def step_left_out_on_one_rank(job: Job) -> None:
    """One rank leaves out `optimizer.step()`, as by the loss of its own rows."""
    net = chain_with_loss()
    optimizer = adam(net)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    model(*job.batch(pairs, 1)).backward()
    if job.rank == 0:
        optimizer.step()
    learn(job, model, optimizer, step=2)


_CLEARED = (REPLICAS, STAGES, Setting((5, 3), 1, 1, "1"), Setting((5, 3), 1, 1, "2"))


def _clear_on_one_rank(job: Job, clear: Callable[[nn.Module, Optimizer], None]) -> None:
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    model(*job.batch(pairs)).backward()
    if job.rank == 1:
        clear(model, optimizer)
    model(*job.batch(pairs, 1)).backward()
    optimizer.step()
    model(*job.batch(pairs, 2))


@refused("MismatchError", "optimizer.zero_grad", settings=_CLEARED, instead="decide by what is equal on all ranks")
def gradients_cleared_before_a_step_on_one_rank(job: Job) -> None:
    """One rank calls `optimizer.zero_grad()` before a step, as after a loss of its own rows that is not finite."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    optimizer.zero_grad()
    model(*job.batch(pairs, 1)).backward()
    if job.rank == 1:
        optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    learn(job, model, optimizer, step=2)


@refused("MismatchError", "optimizer.zero_grad", settings=_CLEARED, instead="decide by what is equal on all ranks")
def gradients_cleared_between_backwards_on_one_rank(job: Job) -> None:
    """Gradients of several backwards add up, and one rank calls `optimizer.zero_grad()` between them."""
    _clear_on_one_rank(job, lambda model, optimizer: optimizer.zero_grad())


@refused("MismatchError", "model.zero_grad", settings=_CLEARED, instead="decide by what is equal on all ranks")
def gradients_of_the_model_cleared_on_one_rank(job: Job) -> None:
    """Gradients of several backwards add up, and one rank calls `model.zero_grad()` between them."""
    _clear_on_one_rank(job, lambda model, optimizer: model.zero_grad())


def _trained_by_another(job: Job) -> tuple[Any, SGD]:
    """A model, after a step of an optimizer that it was not given."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net)
    learn(job, model, optimizer)
    return model, optimizer


@refused("MismatchError", "model.zero_grad", "was not given", instead="decide by what is equal on all ranks")
def gradients_of_a_further_optimizer_cleared_on_one_rank(job: Job) -> None:
    """One rank calls `model.zero_grad()` between backwards, for an optimizer that `RaNNCModule` was not given."""
    model, optimizer = _trained_by_another(job)
    model(*job.batch(pairs, 1)).backward()
    if job.rank == 1:
        model.zero_grad()
    model(*job.batch(pairs, 2)).backward()
    optimizer.step()
    model(*job.batch(pairs, 3))


@equal(settings=_CLEARED)
def gradients_cleared_twice_on_one_rank(job: Job) -> None:
    """One rank calls `optimizer.zero_grad()` once more than the others, where there is nothing left to clear."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(3):
        if job.rank == 1:
            optimizer.zero_grad()
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused("MismatchError", "lr", "was not given", instead="give every rank the same value")
def rate_of_a_further_optimizer_on_one_rank(job: Job) -> None:
    """An optimizer that `RaNNCModule` was not given gets another learning rate on one rank."""
    model, optimizer = _trained_by_another(job)
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + job.rank)
    for step in (1, 2):
        learn(job, model, optimizer, step=step)


@refused("MismatchError", "optimizer.step", instead="decide by what is equal on all ranks")
def step_of_a_further_optimizer_left_out_on_one_rank(job: Job) -> None:
    """One rank leaves out a step of an optimizer that `RaNNCModule` was not given."""
    model, optimizer = _trained_by_another(job)
    model(*job.batch(pairs, 1)).backward()
    if job.rank == 0:
        optimizer.step()
    learn(job, model, optimizer, step=2)


@equal(NOT_WHOLE)
def noise_added_to_gradients(job: Job) -> None:
    """`param.grad.add_(torch.randn_like(param) * 0.1)`, with the same seed on all ranks."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step, batch in enumerate(job.batches(pairs)):
        optimizer.zero_grad()
        model(*batch).backward()
        torch.manual_seed(step)
        for param in (param for param in model.parameters() if param.grad is not None):
            param.grad.add_(torch.randn_like(param) * 0.1)
            param.grad.mul_(torch.rand_like(param.grad))
        job.same("drawn next", torch.rand(2))
        optimizer.step()
    job.state(model)


@equal(NOT_WHOLE[:-1], note="where gradients are whole")
def gradients_summed_by_hand(job: Job) -> None:
    """Copies of gradients (`param.grad.clone()`, `.detach()`, `.contiguous()`) are summed and put back in place."""
    net = chain_with_loss()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    for step in range(0, 4, 2):
        sums: list[Tensor] = []
        for part in (step, step + 1):
            optimizer.zero_grad()
            model(*job.batch(pairs, part)).backward()
            kept = [param.grad.detach().clone().contiguous() for param in net.parameters() if param.grad is not None]
            sums = [total + grad for total, grad in zip(sums, kept, strict=True)] if sums else kept
        for param, total in zip(net.parameters(), sums, strict=True):
            param.grad = total / 2
        optimizer.step()
    job.state(model)
