"""What the end of a step costs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from pyrannc.profile.update import describe, measure_update

from .models import CPU


class Strange(torch.optim.SGD):
    """Takes no other parameters than its own."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("only on Sundays")


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, dtype=torch.float64))]


def test_the_time_grows_with_the_work_and_the_given_optimizer_is_left_alone() -> None:
    plain, adam = torch.optim.SGD(params(), lr=0.1), torch.optim.AdamW(params())
    groups = [dict(group) for group in adam.param_groups]
    found = [measure_update(optimizer, CPU) for optimizer in (plain, adam)]
    assert all(point is not None and point.update_us > 0 for point in found)
    assert found[1] is not None
    assert found[1].params_bytes == 16 * (1 << 16) * 8
    assert not adam.state
    assert [dict(group) for group in adam.param_groups] == groups
    assert all(torch.equal(param, torch.ones(3)) for group in groups for param in group["params"])


def test_an_optimizer_that_cannot_be_measured_is_estimated(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pyrannc"):
        assert measure_update(Strange(params(), lr=0.1), CPU) is None
    assert "only on Sundays" in caplog.text


def test_descriptions_tell_apart_what_takes_other_times() -> None:
    optimizers = [
        None,
        torch.optim.SGD(params(), lr=0.1),
        torch.optim.AdamW(params()),
        torch.optim.AdamW(params(), foreach=True),
        torch.optim.AdamW(params(), foreach=False),
        torch.optim.AdamW([nn.Parameter(torch.ones(3))]),
    ]
    assert len({describe(optimizer) for optimizer in optimizers}) == len(optimizers)
    assert describe(optimizers[2]) == describe(torch.optim.AdamW(params(), lr=7.0))


def test_groups_without_parameters_are_passed_over() -> None:
    nothing: list[nn.Parameter] = []
    groups = [{"params": nothing, "weight_decay": 0.1}, {"params": params()}]
    some = torch.optim.AdamW(groups)
    assert measure_update(some, CPU) is not None
    assert describe(some) == describe(torch.optim.AdamW(params()))
    none = torch.optim.AdamW([{"params": nothing}])
    assert measure_update(none, CPU) is None
    assert describe(none) == ""
