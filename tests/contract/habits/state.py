"""Ways round the wrapper: to the model's own parameters, state and methods."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam

import pyrannc
from tests.contract.habit import equal
from tests.contract.job import Job
from tests.contract.training import Chain, Returns, learn


def _learned(job: Job) -> tuple[Returns, nn.Module, torch.optim.Optimizer]:
    net = Returns(Chain(), F.mse_loss)
    optimizer = Adam(net.parameters(), lr=0.01)
    model = job.wrap(net, optimizer)
    learn(job, model, optimizer)
    return net, model, optimizer


@equal()
def copied(job: Job) -> None:
    """`copy.deepcopy(model)` before the first call, as of an average of weights."""
    net = Returns(Chain(), F.mse_loss)
    optimizer = SGD(net.parameters(), lr=0.1)
    model = job.wrap(net, optimizer)
    copied = copy.deepcopy(model)
    learn(job, model, optimizer)
    job.same("state", dict(copied.state_dict()))


@equal()
def optimizer_state_of_all_ranks(job: Job) -> None:
    """`optimizer.state_dict(from_global=True)` on all ranks, and `load_state_dict(..., from_global=True)`."""
    _, model, optimizer = _learned(job)
    wrapped = {"from_global": True} if isinstance(model, pyrannc.RaNNCModule) else {}
    state = copy.deepcopy(optimizer.state_dict(**wrapped))
    if job.rank == 0:
        moments = [entry["exp_avg"] for _, entry in sorted(state["state"].items())]
    learn(job, model, optimizer, step=1)
    optimizer.load_state_dict(state, **wrapped)
    job.same("moments", len(moments) if job.rank == 0 else 8)
    learn(job, model, optimizer, step=2)
    job.state(model)
