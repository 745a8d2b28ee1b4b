"""Models that load kernels by what they compute, while messages are under way, train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
ROWS, WIDTH = 8, 256
CHOICES: list[Callable[[Tensor], Tensor]] = [
    *(torch.tanh, torch.sin, torch.cos, torch.erf, torch.atan, torch.asinh, torch.expm1, torch.sigmoid, F.softplus),
    *(F.silu, F.elu, F.gelu, F.mish, F.selu, F.hardtanh, F.softsign, F.logsigmoid, F.tanhshrink, F.hardswish),
]
"""Each has kernels of its own, forward and backward."""


class Chosen(nn.Module):
    """Each row goes through a function of its own, of which a step has few."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for choice in F.one_hot(which, len(CHOICES)).sum(0).nonzero():
            rows = torch.where(which == choice)[0]
            y = y.index_add(0, rows, CHOICES[int(choice)](self.linear(x[rows])))
        return self.after(y).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Chosen() for _ in range(6))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, which)
        return x.square().mean()


def _trained(wraps: bool) -> tuple[dict[str, Tensor], bool]:
    """The state after a step with each function, and whether messages have gone by way of hosts."""
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    net = Layers().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model: Any = net.to(device)
    rows = slice(None)
    if wraps:
        model = pyrannc.RaNNCModule(net, optimizer)
        rows = slice(0, 3) if pyrannc.get_rank() == 0 else slice(3, ROWS)
    for choice in range(len(CHOICES)):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(choice), dtype=torch.float64)
        which = torch.full((ROWS,), choice)
        optimizer.zero_grad()
        model(x[rows].to(device), which[rows].to(device)).backward()
        optimizer.step()
    if not wraps:
        return net.state_dict(), False
    state: dict[str, Tensor] = model.state_dict(rank0_only=False)
    contexts = model._deployment._contexts.values()
    by_hosts = all(context.channels.by_hosts for context in contexts)
    model.undeploy()
    return state, by_hosts


def _both() -> tuple[float, bool]:
    wrapped, by_hosts = _trained(True)
    plain, _ = _trained(False)
    return max(float((wrapped[key].cpu() - value.cpu()).abs().max()) for key, value in plain.items()), by_hosts


@pytest.mark.parametrize("microbatches", ["2", "4"])
def test_equals_one_process(microbatches: str, ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": microbatches}
    for apart, by_hosts in ranks(2).run(_both, env=env):
        assert by_hosts
        assert apart < 1e-10
