"""A rehearsal of a step leaves nothing behind; on GPUs it keeps ranks from loading kernels while they receive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import nn

import pyrannc
from pyrannc.runtime import rehearsal
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, environment

Ranks = Callable[[int], RankPool]
ROWS = (3, 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x).tanh())
        return self.norm(x).square().mean()


def train(rehearsed: bool) -> dict[str, torch.Tensor]:
    """The state after some steps."""
    with (
        patch.object(rehearsal, "is_needed", lambda context, program: rehearsed),
        patch.object(rehearsal, "_rehearse", wraps=rehearsal._rehearse) as rehearse,
    ):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = pyrannc.RaNNCModule(net, optimizer)
        torch.manual_seed(pyrannc.get_rank())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(ROWS[pyrannc.get_rank()], 6)).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(ROWS[pyrannc.get_rank()], 6))
        state = copy.deepcopy(model.state_dict(rank0_only=False))
        assert rehearse.call_count == 2 * rehearsed
        model.undeploy()
        return state


def compare() -> list[str]:
    with double_precision(), environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}):
        differences = Differences(0.0)
        expected = train(rehearsed=False)
        for name, tensor in train(rehearsed=True).items():
            differences.compare(name, tensor, expected[name])
        return differences.found


def test_a_rehearsal_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks(2).run(compare) == [[], []]
