"""What is measured of calls that are replayed as CUDA graphs in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from pyrannc.profile.meter import Meter

GPU = torch.device("cuda", 0)


def test_replayed_calls_are_timed_as_replayed() -> None:
    meter = Meter(GPU, replayed=True)
    with meter.where_replays_are_made():
        weight = torch.randn(512, 512, device=GPU, requires_grad=True)
        weight.grad = torch.zeros_like(weight)
        x = torch.randn(512, 512, device=GPU)
        loss = (x @ weight).relu().sum()

        def backward() -> None:
            loss.backward(retain_graph=True)

        assert meter._recorded(backward, 3) is not None
        short_us = meter.time_us(backward)
        before = weight.grad.clone()
        backward()
        once = weight.grad - before
        # Five launches from a host with nothing between them take longer than the kernels.
        assert 0 < short_us < 1000
        assert torch.isfinite(once).all()
        assert meter.time_us(lambda: [x @ x for _ in range(40)]) > 4 * meter.time_us(lambda: [x @ x for _ in range(4)])


def test_a_call_that_waits_for_the_device_is_timed_all_the_same() -> None:
    meter = Meter(GPU, replayed=True)
    with meter.where_replays_are_made():
        x = torch.randn(64, 64, device=GPU)

        def waits() -> Tensor:
            return x * float(x.sum())

        assert meter._recorded(waits, 1) is None
        assert meter.time_us(waits) > 0
        # What failed has left nothing behind.
        assert meter._recorded(lambda: x @ x, 1) is not None
    torch.cuda.synchronize()
    assert torch.cuda.current_stream(GPU) == torch.cuda.default_stream(GPU)
