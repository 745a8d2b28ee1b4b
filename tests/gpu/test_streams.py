"""Losses and gradients are there on the stream that asks for them, whatever streams the model is called on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import pyrannc
from pyrannc.capture.torch_internals.graphs import Graph
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


def losses_of_two_streams() -> tuple[list[Tensor], list[Tensor]]:
    """Of one process, and of replays that are held up behind where they have taken their inputs.

    The script orders nothing between two calls of a model that stays as it is.
    """
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    net = Layers().to(device)
    batches = torch.randn(2, 2, 32, WIDTH, device=device)
    expected = [net(*batch).detach().clone() for batch in batches]
    model: Any = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for _ in range(4):
        model(*batches[0])
    assert model.report().recorded.startswith("1 of 1 kinds of steps are replayed")
    streams: list[torch.cuda.Stream] = [torch.cuda.Stream() for _ in batches]  # type: ignore[no-untyped-call]  # torch has no types for it
    replay, found = Graph.replay, []

    def late(graph: Graph) -> None:
        torch.cuda._sleep(CYCLES)
        replay(graph)

    torch.cuda.synchronize()
    with patch.object(Graph, "replay", late):
        for batch, stream in zip(batches, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(model(*batch).detach())
    torch.cuda.synchronize()
    model.undeploy()
    return [loss.cpu() for loss in expected], [loss.cpu() for loss in found]


def test_calls_on_two_streams(ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off"}
    [(expected, found)] = ranks(1).run(losses_of_two_streams, env=env)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


TINY, SCALE = 1e-34, 2.0**40


def scales(inside: bool) -> list[float]:
    """Of steps, in the last of which gradients overflow on one rank alone, on a stream that is held up."""
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    net = Layers().to(device)
    nn.init.constant_(net.get_parameter("layers.0.weight"), TINY)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model: Any = pyrannc.RaNNCModule(net, optimizer)
    scaler, found = torch.amp.GradScaler("cuda", init_scale=SCALE), []
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types for it
    for step in range(STEPS):
        x, target = torch.randn(2, 32, WIDTH, device=device)
        optimizer.zero_grad()
        other.wait_stream(main)
        with torch.cuda.stream(other):
            if step == STEPS - 1:
                torch.cuda._sleep(CYCLES)
                x = x / TINY
            loss = scaler.scale(model(x, target) if inside else F.mse_loss(model(x), target))
        loss.backward()
        main.wait_stream(other)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    model.undeploy()
    return found


@pytest.mark.parametrize("inside", [False, True], ids=["criterion_outside", "loss_inside"])
def test_all_ranks_judge_gradients_of_another_stream(ranks: Ranks, inside: bool) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}
    expected = [SCALE] * (STEPS - 1) + [SCALE / 2]
    assert ranks(2).run(scales, inside, env=env) == [expected, expected]
