"""Ways round the wrapper: to the model's own parameters, state and methods."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam

import pyrannc
from tests.contract.habit import equal, not_yet, refused
from tests.contract.job import Job
from tests.contract.settings import ONCE, REPLICAS
from tests.contract.training import Chain, Returns, learn, pairs

ON_OTHER_RANKS = "use `model.state_dict()`, `model.get_param(name)`"


def _learned(job: Job) -> tuple[Returns, nn.Module, torch.optim.Optimizer]:
    net = Returns(Chain(), F.mse_loss)
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    return net, model, optimizer


@not_yet("saved without a word, with the values of the last `undeploy()` or of the start for what lies on other ranks")
@refused("RaNNCError", "state_dict", settings=(ONCE[1],), instead=ON_OTHER_RANKS)
def state_of_the_plain_model(job: Job) -> None:
    """`net.state_dict()` of the wrapped model, where other ranks hold a part of the parameters."""
    net, _, _ = _learned(job)
    job.same("state", dict(net.state_dict()))


@not_yet("each rank clips by the norm of its own share")
@refused("RaNNCError", "clip_grad_norm", settings=(ONCE[1],), instead="`model.clip_grad_norm(max_norm)`")
def clipped_by_torch(job: Job) -> None:
    """`nn.utils.clip_grad_norm_(model.parameters(), 1.0)` where other ranks hold a part of the parameters."""
    _, model, _ = _learned(job)
    job.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    job.gradients(model)


@not_yet("the wrapper shows no modules")
@equal()
def modules_listed(job: Job) -> None:
    """`model.modules()`, `model.children()` and `model.apply()` visit the model's modules."""
    _, model, _ = _learned(job)
    visited: list[str] = []
    model.apply(lambda module: visited.append(type(module).__name__))
    inner = [type(module).__name__ for module in model.modules() if not isinstance(module, pyrannc.RaNNCModule)]
    job.same("modules", inner)
    job.same("visited", [name for name in visited if name != "RaNNCModule"])
    job.same("layers", sum(isinstance(module, nn.Linear) for module in model.modules()))


@not_yet("`model.parameters()` has this rank's parameters, and the sum is that of its share")
@equal()
def parameters_counted(job: Job) -> None:
    """`sum(p.numel() for p in model.parameters())` after the first call."""
    _, model, _ = _learned(job)
    job.same("count", sum(param.numel() for param in model.parameters()))


@not_yet("it is set on the wrapper, and the model does not see it")
@equal()
def attribute_set_on_the_wrapper(job: Job) -> None:
    """`model.alpha = 0.5` sets the attribute of the wrapped model."""

    class Net(Chain):
        alpha = 1.0

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(super().forward(x) * self.alpha, target)

    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    model.alpha = 0.5
    learn(job, model, optimizer)


@equal()
def copied(job: Job) -> None:
    """`copy.deepcopy(model)` before the first call, as of an average of weights."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    copied = copy.deepcopy(model)
    learn(job, model, optimizer)
    job.same("state", dict(copied.state_dict()))


@not_yet("a `TypeError`")
@equal()
def copied_later(job: Job) -> None:
    """`copy.deepcopy(model)` after the first call."""
    _, model, _ = _learned(job)
    job.state(copy.deepcopy(model))


@not_yet("the wrapper takes the call and changes nothing")
@refused("RaNNCError", "half|bfloat16|dtype", instead="change the type before wrapping: `net.bfloat16()`")
def type_changed_after_wrapping(job: Job) -> None:
    """`model.bfloat16()` or `model.half()` after wrapping."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    model.bfloat16()


@refused("InputError", "is another object than at deployment", instead="leave out `assign=True`")
def state_assigned(job: Job) -> None:
    """`model.load_state_dict(state, assign=True)` after the first call."""
    _, model, optimizer = _learned(job)
    model.load_state_dict(model.state_dict(rank0_only=False) if job.ranks > 1 else model.state_dict(), assign=True)
    learn(job, model, optimizer, step=1)
    job.state(model)


@equal((REPLICAS,))
def gradients_kept_by_the_script(job: Job) -> None:
    """The script keeps `param.grad` of a loss, and computes those of another one."""
    _, model, _ = _learned(job)
    kept = []
    for step in (1, 2):
        model.zero_grad()
        model(*job.batch(pairs, step)).backward()
        kept.append([param.grad for param in model.parameters()])
    job.same("differ", all(not torch.equal(first, second) for first, second in zip(*kept, strict=True)))


@equal()
def gradient_of_an_input_alone(job: Job) -> None:
    """`torch.autograd.grad(loss, x)` leaves the gradients of parameters alone."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    x, target = job.batch(pairs)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, target), x)
    job.rows("gradient of x", gradient)
    job.gradients(model)


@equal()
def head_without_gradient(job: Job) -> None:
    """The model returns outputs of two heads; the script uses one, and the other's gradients stay None."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain, self.first, self.second = Chain(3), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.chain(x)
            return self.first(hidden), self.second(hidden)

    model = job.wrap(Net())
    for x, _ in job.batches(pairs):
        first, _ = model(x)
        (first.square().sum() / max(1, len(x))).backward()
    job.gradients(model)
