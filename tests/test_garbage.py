"""What Python looks for while the first call runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc.job.garbage import older_objects_left_alone
from tests.ranks import RankPool


class _Fails(Exception):
    pass


def test_only_what_is_made_meanwhile_is_looked_at() -> None:
    assert gc.get_freeze_count() == 0

    def fail() -> None:
        with older_objects_left_alone(torch.device("cpu")):
            assert gc.get_freeze_count() > 0
            raise _Fails

    with pytest.raises(_Fails):
        fail()
    assert gc.get_freeze_count() == 0


def test_what_a_script_has_frozen_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with older_objects_left_alone(torch.device("cpu")):
            assert gc.get_freeze_count() == count
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()


def test_a_script_without_searches_has_its_way() -> None:
    gc.disable()
    try:
        with older_objects_left_alone(torch.device("cpu")):
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


class _Noting(nn.Module):
    """Notes how many objects are left alone whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.get_freeze_count())
        made: torch.Tensor = self.layer(x)
        return made


seen: list[int] = []


def _called() -> tuple[list[int], int]:
    module = pyrannc.RaNNCModule(_Noting())
    module(torch.ones(2, 4))
    return seen, gc.get_freeze_count()


def test_a_first_call_leaves_older_objects_alone(ranks: Callable[[int], RankPool]) -> None:
    ((meanwhile, after),) = ranks(1).run(_called)
    assert meanwhile
    assert all(meanwhile)
    assert after == 0
