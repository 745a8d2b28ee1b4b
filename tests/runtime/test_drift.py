"""What ranks must have alike is compared a few calls later, to what devices of different kinds may round."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import pyrannc
from pyrannc.call.drift import Drift
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _refused_at(values: list[list[float]], dtype: torch.dtype, calls: int = 10) -> tuple[int, str]:
    """The call at which copies are found to differ that have these values on each rank, and why; 0: at none."""
    pyrannc.barrier()
    param = torch.tensor(values[pyrannc.get_rank()], dtype=dtype)
    drift = Drift({"same": torch.ones(3), "layer.weight": param}, [(0, 1)])
    for call in range(1, calls + 1):
        try:
            drift.follow()
        except pyrannc.MismatchError as error:
            return call, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[1.0, 2.0], [1.0, 2.0 + 1e-6]], torch.float32),
        ([[1.0, 2.0], [1.0, 2.0 + 1e-14]], torch.float64),
        ([[256.0, 2.0], [257.0, 2.0]], torch.bfloat16),
        ([[math.nan, 2.0], [math.nan, 2.0]], torch.float32),
        ([[], []], torch.float32),
        ([[1, 2], [3, 4]], torch.int64),
    ],
)
def test_what_rounding_explains_is_let_pass(values: list[list[float]], dtype: torch.dtype, ranks: Ranks) -> None:
    assert ranks(2).run(_refused_at, values, dtype) == [(0, "")] * 2


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([[1.0, 2.0], [1.0, 2.001]], torch.float32),
        ([[1.0, 2.0], [1.0, 2.0 + 1e-10]], torch.float64),
        ([[1.0, 2.0], [1.0, 2.25]], torch.bfloat16),
        ([[0.0, 0.0], [1e-9, 0.0]], torch.float32),
        ([[1.0, 2.0], [math.nan, 2.0]], torch.float32),
        ([[math.inf, 2.0], [1.0, 2.0]], torch.float32),
        ([[1 + 1j, 2.0], [1 + 2j, 2.0]], torch.complex64),
    ],
)
def test_copies_that_differ_are_refused_on_all_ranks(
    values: list[list[float]], dtype: torch.dtype, ranks: Ranks
) -> None:
    for call, text in ranks(2).run(_refused_at, values, dtype):
        assert call == 3
        assert 'copies of parameter "layer.weight"' in text


def _late(first_wrong: int, calls: int) -> int:
    pyrannc.barrier()
    param = torch.ones(4)
    drift = Drift({"weight": param}, [(0, 1)])
    for call in range(1, calls + 1):
        if call == first_wrong:
            param.add_(pyrannc.get_rank())
        try:
            drift.follow()
        except pyrannc.MismatchError:
            return call
    return 0


def test_copies_that_drift_apart_late_are_found_within_a_hundred_calls(ranks: Ranks) -> None:
    assert ranks(2).run(_late, 130, 250) == [202, 202]


def _of_one_replica() -> int:
    pyrannc.barrier()
    drift = Drift({"weight": torch.full((4,), float(pyrannc.get_rank()))}, [(0,), (1,)])
    for _ in range(10):
        drift.follow()
    return 1


def test_stages_of_one_replica_have_nothing_in_common(ranks: Ranks) -> None:
    assert ranks(2).run(_of_one_replica) == [1, 1]
