"""Optimizers that are made of another one, such as Lookahead and SAM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import REPLICAS, STAGES, Setting
from tests.contract.training import adam, chain_with_loss, learn, pairs

SEVERAL_STAGES = (STAGES, Setting((3, 0, 5), 3, 1))


class Bare(Optimizer):
    """Lookahead: weights step with another optimizer and are drawn back to slow ones. It calls no `super().__init__()`
    and has no hooks."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.defaults, self.state = inner, inner.param_groups, {}, inner.state
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _look_ahead(self)


class Lookahead(Bare):
    """The same with hooks, as timm has it."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        super().__init__(inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        Optimizer.zero_grad(self, set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        _look_ahead(self)


@torch.no_grad()
def _look_ahead(optimizer: Bare) -> None:
    optimizer.inner.step()
    optimizer.steps += 1
    for param in [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]:
        slow = optimizer.inner.state[param].setdefault("slow", param.clone())
        if optimizer.steps % 2 == 0:
            param.copy_(slow.lerp_(param, 0.5))


def _looks_ahead(job: Job, given: Callable[[Bare], Optimizer | None], made: type[Bare] = Lookahead) -> None:
    net = chain_with_loss()
    optimizer = made(adam(net))
    model = job.wrap(net, given(optimizer))
    for step in range(4):
        learn(job, model, optimizer, step=step)
    job.state(model)


def _itself(optimizer: Bare) -> Optimizer:
    return optimizer


def _by_parameter(optimizer: Bare) -> Optimizer:
    optimizer.by_parameter = True  # type: ignore[attr-defined]
    return optimizer


@equal(settings=(REPLICAS,))
def lookahead(job: Job) -> None:
    """Lookahead is made of another optimizer, and parameters are whole."""
    _looks_ahead(job, _itself)


@refused(
    "RaNNCError",
    'give RaNNCModule the one in its attribute "inner"',
    settings=SEVERAL_STAGES,
    instead="give `RaNNCModule` the optimizer that it is made of",
)
def lookahead_over_stages(job: Job) -> None:
    """The same over several Stages."""
    _looks_ahead(job, _itself)


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def inner_of_lookahead(job: Job) -> None:
    """The same, and `RaNNCModule` is given the optimizer that it is made of."""
    _looks_ahead(job, lambda optimizer: optimizer.inner)


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def lookahead_not_given(job: Job) -> None:
    """The same, and `RaNNCModule` is given no optimizer."""
    _looks_ahead(job, lambda optimizer: None)


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def lookahead_said_to_be_by_parameter(job: Job) -> None:
    """The same, and the script says that it treats each parameter by itself (`by_parameter = True`)."""
    _looks_ahead(job, _by_parameter)


@equal(settings=(REPLICAS,))
def lookahead_without_hooks(job: Job) -> None:
    """Lookahead that is no whole optimizer, as it calls no `super().__init__()`, where parameters are whole."""
    _looks_ahead(job, _itself, Bare)


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def lookahead_without_hooks_said_to_be_by_parameter(job: Job) -> None:
    """The same, and the script says that it treats each parameter by itself (`by_parameter = True`)."""
    _looks_ahead(job, _by_parameter, Bare)


class SlowWeights(Optimizer):
    """Lookahead with groups of its own, and names of the parameters."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})
        self.names = {param: name for name, param in net.named_parameters()}
        self.inner, self.steps = SGD(net.parameters(), lr=0.1, momentum=0.9), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                slow = self.state[param].setdefault("slow", param.clone())
                if self.steps % 2 == 0:
                    param.copy_(slow.lerp_(param, 0.5))


@equal(settings=(*SEVERAL_STAGES, REPLICAS))
def lookahead_with_groups_of_its_own(job: Job) -> None:
    """Lookahead lists what its inner optimizer does in groups of its own, and `RaNNCModule` is given no optimizer."""
    net = chain_with_loss()
    optimizer = SlowWeights(net)
    model = job.wrap(net)
    for step in range(4):
        learn(job, model, optimizer, step=step)
    job.state(model)


class Sharpness(Optimizer):
    """SAM: goes up along the gradient of all parameters, takes the gradient there, and steps from where it was."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.inner = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        before = [param.detach().clone() for param in params]
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in params]).norm()
            for param in params:
                param.add_(param.grad, alpha=(self.param_groups[0]["rho"] / norm).item())
        self.zero_grad()
        closure()
        for param, data in zip(params, before, strict=True):
            param.data = data
        self.inner.step()


def _sharpness(job: Job) -> None:
    net = chain_with_loss()
    optimizer = Sharpness(net.parameters())
    model = job.wrap(net, optimizer.inner)
    for batch in job.batches(pairs):
        loss = model(*batch)
        job.same("loss", loss)
        loss.backward()
        optimizer.step(lambda batch=batch: model(*batch).backward())
        optimizer.zero_grad()
    job.state(model)


@equal(settings=(REPLICAS, Setting((3, 0, 5), 1, 2, zero="1")))
def sharpness_aware(job: Job) -> None:
    """SAM takes two gradients a step; `RaNNCModule` is given the optimizer that it is made of. One Stage."""
    _sharpness(job)


@refused("RaNNCError", "RANNC_PARTITION_NUM=1", settings=SEVERAL_STAGES, instead="force one Stage")
def sharpness_aware_over_stages(job: Job) -> None:
    """The same over several Stages."""
    _sharpness(job)
