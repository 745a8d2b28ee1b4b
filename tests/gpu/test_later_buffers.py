"""Buffers that only later calls use are on the device then, whatever the model was on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Normed(nn.Module):
    """Takes a mean away in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.full((8,), 3.0))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.training else y - self.mean


def _evaluated() -> tuple[float, float, set[str]]:
    """The mean of what training and evaluation give, and where the model is after all."""
    torch.manual_seed(0)
    module = Normed()
    model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.0))
    x = torch.ones(4, 8, device=process.ensure_process_group().device)
    trained = model(x).mean()
    trained.backward()
    model.eval()
    with torch.no_grad():
        evaluated = model(x).mean().item()
    model.undeploy()
    return trained.item(), evaluated, {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_a_buffer_of_evaluation_alone(ranks: Ranks) -> None:
    [(trained, evaluated, devices)] = ranks(1).run(_evaluated, env={"RANNC_PROFILE": "never"})
    assert evaluated == pytest.approx(trained - 3.0, rel=1e-5)
    assert devices == {"cpu"}
