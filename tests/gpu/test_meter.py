"""What is measured of calls that are replayed as CUDA graphs in a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pyrannc.blocks.randomness import Randomness
from pyrannc.profile.meter import Meter

GPU = torch.device("cuda", 0)


@pytest.fixture
def meter() -> Iterator[Meter]:
    made = Meter(GPU, replayed=True)
    with made.where_replays_are_made():
        yield made
    torch.cuda.synchronize()
    assert torch.cuda.current_stream(GPU) == torch.cuda.default_stream(GPU)


class Counted:
    """A call that counts how often the host makes it."""

    def __init__(self) -> None:
        self.calls = 0
        self.weight = nn.Parameter(torch.randn(512, 512, device=GPU))
        self.weight.grad = torch.zeros_like(self.weight)
        self.loss = (torch.randn(512, 512, device=GPU) @ self.weight).relu().sum()

    def __call__(self) -> None:
        self.calls += 1
        self.loss.backward(retain_graph=True)


def test_replays_are_timed_instead_of_calls(meter: Meter) -> None:
    called, replayed = Counted(), Counted()
    plain_us = Meter(GPU).time_us(called)
    replayed_us = meter.time_us(replayed)
    assert meter.replays
    assert replayed.calls < called.calls
    assert 0 < replayed_us < 1.5 * plain_us
    grad = replayed.weight.grad
    assert grad is not None
    assert torch.isfinite(grad).all()
    x = torch.randn(512, 512, device=GPU)
    few_us, many_us = (meter.time_us(lambda n=n: [x @ x for _ in range(n)]) for n in (8, 64))
    assert 5 < many_us / few_us < 11


def test_what_waits_for_the_device_is_timed_as_it_is(meter: Meter) -> None:
    x = torch.randn(1 << 20, device=GPU)

    def waits() -> Tensor:
        return x * float((x * 2).sum())

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert meter.time_us(waits) > 0
    assert not meter.replays
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    # Another Block may be replayed.
    with meter.where_replays_are_made():
        assert meter.replays
        assert meter.time_us(lambda: x * 2) > 0
        assert meter.replays


def test_what_draws_is_replayed(meter: Meter) -> None:
    randomness = Randomness(GPU)
    x = torch.ones(1 << 16, device=GPU)
    seen = []

    def draws() -> None:
        randomness.place(3, by_rows=False)
        seen.append(torch.nn.functional.dropout(x, 0.5))

    with randomness.borrowed():
        meter.draw_from(randomness)
        assert meter.time_us(draws) > 0
    assert meter.replays
    assert 0.4 < float((seen[-1] == 0).double().mean()) < 0.6


def test_what_draws_and_waits_is_measured_as_it_is(meter: Meter) -> None:
    randomness = Randomness(GPU)
    x = torch.ones(1 << 16, device=GPU)

    def draws() -> float:
        randomness.place(3, by_rows=False)
        return float(torch.nn.functional.dropout(x, 0.5).sum())

    with randomness.borrowed():
        meter.draw_from(randomness)
        assert meter.time_us(draws) > 0
        assert not meter.replays
        assert 0.4 < draws() / (2 * x.numel()) < 0.6


def test_products_take_longer_beside_a_message(meter: Meter) -> None:
    # As many thread blocks as there are multiprocessors: two of them come a second time round.
    blocks = torch.cuda.get_device_properties(GPU).multi_processor_count
    first = torch.randn(128 * blocks, 8192, device=GPU, dtype=torch.bfloat16)
    second = torch.randn(8192, 256, device=GPU, dtype=torch.bfloat16)
    copied = torch.randn(1 << 26, device=GPU)
    product = meter.message_slowdown(lambda: first @ second)
    copy = meter.message_slowdown(lambda: copied * 2)
    assert product is not None
    assert copy is not None
    assert 0.05 < product < 1.2
    assert copy < 0.05
