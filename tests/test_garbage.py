"""What Python looks for while the first call runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc.frozen import all_objects, many_are_frozen
from pyrannc.job.garbage import older_objects_left_alone
from tests.ranks import RankPool

MANY = 10_000
"""Python itself freezes some hundreds of objects, a process with torch has many more."""


class _Fails(Exception):
    pass


def test_only_what_is_made_meanwhile_is_looked_at() -> None:
    def fail() -> None:
        with older_objects_left_alone(torch.device("cpu")):
            assert gc.get_freeze_count() > MANY
            raise _Fails

    with pytest.raises(_Fails):
        fail()
    assert gc.get_freeze_count() < MANY


def test_what_a_script_has_frozen_stays_so() -> None:
    frozen = _Fails()
    gc.freeze()
    made_later = _Fails()
    try:
        with older_objects_left_alone(torch.device("cpu")):
            assert not _listed(frozen)
            assert _listed(made_later)
        assert not _listed(frozen)
    finally:
        gc.unfreeze()


def _listed(error: _Fails) -> bool:
    """Whether Python looks at it: frozen objects die as others do, so that their count tells nothing."""
    return any(item is error for item in gc.get_objects())


def test_what_is_frozen_is_listed() -> None:
    error = _Fails()
    gc.freeze()
    try:
        assert not _listed(error)
        assert any(item is error for item in all_objects())
        assert many_are_frozen()
    finally:
        gc.unfreeze()
    assert not many_are_frozen()
    assert any(item is error for item in all_objects())


def test_a_script_without_searches_has_its_way() -> None:
    gc.disable()
    try:
        with older_objects_left_alone(torch.device("cpu")):
            assert gc.get_freeze_count() < MANY
    finally:
        gc.enable()


class _Noting(nn.Module):
    """Notes how many objects are left alone whenever it runs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.file = file

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.file.open("a") as file:
            print(gc.get_freeze_count(), file=file)
        made: torch.Tensor = self.layer(x)
        return made


def _called(file: Path) -> int:
    module = pyrannc.RaNNCModule(_Noting(file))
    module(torch.ones(2, 4))
    return gc.get_freeze_count()


def test_a_first_call_leaves_older_objects_alone(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    file = tmp_path / "counts"
    (after,) = ranks(1).run(_called, file)
    assert min(map(int, file.read_text().split())) > MANY > after
