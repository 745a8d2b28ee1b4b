"""What else stands round or inside of a model: compilers, other wrappers, scripted parts, precision, old settings."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import pyrannc
from tests.contract.habit import equal, refused
from tests.contract.job import Job
from tests.contract.settings import ONCE
from tests.contract.training import WIDTH, Chain, Returns, fit, learn, pairs, single


def _learn(job: Job, net: nn.Module, **options: Any) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer, **options)
    for step in range(2):
        learn(job, model, optimizer, step=step)
    job.state(model)


@refused("InputError", "autocast", instead="not available yet")
def autocast_outside(job: Job) -> None:
    """The script calls the model under `torch.autocast`."""
    model = job.wrap(Returns(Chain(), F.mse_loss))
    with torch.autocast("cpu", torch.bfloat16):
        model(*job.batch(pairs))


@torch.jit.script
def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.41421))


@equal()
def scripted_function(job: Job) -> None:
    """The model calls a function made by `torch.jit.script`."""
    _learn(job, Returns(Chain(), lambda y, target: F.mse_loss(_gelu(y), target)))


@refused("ConfigError", "RANNC_PARTITON_NUM", "RANNC_PARTITION_NUM", settings=ONCE, instead="the item that is meant")
def misspelt_configuration(job: Job) -> None:
    """A configuration item is misspelt."""
    os.environ["RANNC_PARTITON_NUM"] = "2"
    try:
        job.wrap(Chain())
    finally:
        del os.environ["RANNC_PARTITON_NUM"]


@refused("RaNNCError", "apex", "torch.autocast", settings=ONCE, instead="leave it out")
def apex(job: Job) -> None:
    """`RaNNCModule(..., enable_apex_amp=True)`."""
    job.wrap(Chain(), enable_apex_amp=True)


@refused("RaNNCError", "not available yet", settings=ONCE, instead="leave it out")
def zero(job: Job) -> None:
    """`RaNNCModule(..., enable_zero=True)`."""
    job.wrap(Chain(), enable_zero=True)


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
