"""Gradients are there on the stream that asks for them, whatever stream the model is called on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
WIDTH, STEPS, ALIKE, LATE = 256, 8, 3, 5
CYCLES = 100_000_000
"""That a stream is held up by: long after the host has asked for the gradients."""


class Layers(nn.Module):
    """A chain, with its loss or without."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        y = self.layers(x)
        return y if target is None else F.mse_loss(y, target)


def _gradients(plain: Layers, where: str, inside: bool, hooks: bool, *, wrapped: bool) -> list[Tensor]:
    """Of each step, of which the last ones' streams are held up."""
    device = process.ensure_process_group().device
    net = copy.deepcopy(plain).to(device)
    node = get_gradient_edge(next(net.parameters())).node
    if hooks:
        node.register_hook(lambda *_: None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model: Any = pyrannc.RaNNCModule(net, optimizer) if wrapped else net
    main, other, found = torch.cuda.current_stream(), torch.cuda.Stream(), []  # type: ignore[no-untyped-call]  # torch has no types for it
    torch.manual_seed(1)
    for step in range(STEPS):
        elsewhere = step >= ALIKE or where == "forward"
        on_other: AbstractContextManager[object] = torch.cuda.stream(other) if elsewhere else nullcontext()
        optimizer.zero_grad()
        for x, target in torch.randn(2, 2, 32, WIDTH, device=device):
            other.wait_stream(main)
            with nullcontext() if where == "backward" else on_other:
                if step >= LATE:
                    torch.cuda._sleep(CYCLES)
                loss = model(x, target) if inside else F.mse_loss(model(x), target)
            with on_other if where == "backward" else nullcontext():
                loss.backward()
                grads = [param.grad.flatten() for param in net.parameters() if param.grad is not None]
                found.append(torch.cat(grads))
            main.wait_stream(other)
        optimizer.step()
    torch.cuda.synchronize()
    if wrapped:
        model.undeploy()
    return [grads.cpu() for grads in found]


def compared(where: str, inside: bool, hooks: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    plain = Layers()
    expected, found = (_gradients(plain, where, inside, hooks, wrapped=wrapped) for wrapped in (False, True))
    return expected, found


@pytest.mark.parametrize("hooks", [False, True], ids=["one_leaf", "each_parameter"])
@pytest.mark.parametrize("inside", [False, True], ids=["criterion_outside", "loss_inside"])
@pytest.mark.parametrize("where", ["forward", "forward_later", "backward"])
def test_gradients_of_another_stream(ranks: Ranks, where: str, inside: bool, hooks: bool) -> None:
    [(expected, found)] = ranks(1).run(compared, where, inside, hooks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
