"""Ranks whose copies of parameters drift apart are told so, though their steps are replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import AdamW

import pyrannc
from pyrannc.job import process
from tests.gpu.loops import TOKENS, WORDS, Words
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _refused_at(noise_of: int | None, first: int, steps: int) -> tuple[int, str]:
    """The step at which copies are found to differ, and why; 0: at none."""
    device = process.ensure_process_group().device
    torch.manual_seed(0)
    module = Words(inside=True)
    optimizer = AdamW(module.parameters(), lr=1e-3)
    model = pyrannc.RaNNCModule(module, optimizer)
    noisy = module.get_parameter("layers.2.out.weight")
    drawn = torch.Generator(device).manual_seed(1 + pyrannc.get_rank())
    for step in range(1, steps + 1):
        ids = torch.randint(WORDS, (8, TOKENS), device=device)
        optimizer.zero_grad()
        try:
            loss = model(ids, ids)
        except pyrannc.MismatchError as error:
            return step, str(error)
        loss.backward()
        grad = noisy.grad
        if pyrannc.get_rank() == noise_of and step >= first and grad is not None:
            grad.add_(torch.randn(grad.shape, device=device, generator=drawn), alpha=0.1)
        optimizer.step()
    return 0, ""


ENV = {"RANNC_PROFILE": "never", "RANNC_PARTITION_NUM": "1", "RANNC_ENABLE_ZERO": "off"}


@pytest.mark.parametrize(("first", "found"), [(1, 4), (4, 9)])
def test_noise_on_one_rank_alone(first: int, found: int, ranks: Ranks) -> None:
    for step, text in ranks(2).run(_refused_at, 1, first, 10, env={**ENV, "RANNC_COMPILE_SPANS": "off"}):
        assert step == found
        assert 'copies of parameter "layers.2.out.weight"' in text


def test_hundreds_of_steps_without_noise(ranks: Ranks) -> None:
    assert ranks(2).run(_refused_at, None, 1, 430, env=ENV) == [(0, "")] * 2
