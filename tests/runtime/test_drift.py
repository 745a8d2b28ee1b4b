"""What ranks must have alike is compared a few calls later, to what devices of different kinds may round."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc.call import drift
from pyrannc.call.drift import Drift
from pyrannc.call.sent import Sent
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _watching(param: torch.Tensor, holders: tuple[int, ...] = (0, 1)) -> Drift:
    pyrannc.barrier()
    drift = Drift()
    drift.watch({"same": torch.ones(3), "layer.weight": param}, {"same": (0, 1), "layer.weight": holders})
    return drift


def _refused_at(drift: Drift, calls: int, change: Callable[[int], object] = lambda call: None) -> tuple[int, str]:
    """The call at which copies are found to differ, and why; 0: at none."""
    for call in range(1, calls + 1):
        change(call)
        try:
            drift.follow()
        except pyrannc.MismatchError as error:
            return call, str(error)
    return 0, ""


def _of_values(values: list[list[float]], dtype: torch.dtype) -> tuple[int, str]:
    return _refused_at(_watching(torch.tensor(values[pyrannc.get_rank()], dtype=dtype)), 10)


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
    assert ranks(2).run(_of_values, values, dtype) == [(0, "")] * 2


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
    for call, text in ranks(2).run(_of_values, values, dtype):
        assert call == 3
        assert 'copies of parameter "layer.weight"' in text


def _of_draws(dtype: torch.dtype) -> tuple[int, str]:
    drawn = torch.randn(300, 400, generator=torch.Generator().manual_seed(pyrannc.get_rank()))
    return _refused_at(_watching(drawn.to(dtype)), 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_each_rank_has_drawn_is_refused_though_of_equal_norm(dtype: torch.dtype, ranks: Ranks) -> None:
    assert [call for call, _ in ranks(2).run(_of_draws, dtype)] == [3, 3]


def _late(first_wrong: int, calls: int) -> int:
    param = torch.ones(4)
    wrong = {first_wrong: float(pyrannc.get_rank())}
    return _refused_at(_watching(param), calls, lambda call: param.add_(wrong.get(call, 0.0)))[0]


def test_copies_that_drift_apart_late_are_found_within_a_hundred_calls(ranks: Ranks) -> None:
    assert ranks(2).run(_late, 130, 250) == [194, 194]


def _refused_and_gone_on() -> list[int]:
    """All calls at which copies are found to differ, where the script goes on."""
    drift = _watching(torch.full((4,), float(pyrannc.get_rank())))
    first, _ = _refused_at(drift, 10)
    return [first, first + _refused_at(drift, 20)[0]]


def test_copies_that_still_differ_are_refused_again(ranks: Ranks) -> None:
    assert ranks(2).run(_refused_and_gone_on) == [[3, 8]] * 2


def _made_alike_again() -> int:
    param = torch.full((4,), float(pyrannc.get_rank()))
    return _refused_at(_watching(param), 10, lambda call: param.fill_(1) if call == 3 else None)[0]


def test_what_is_alike_by_the_time_of_the_comparison_is_let_pass(ranks: Ranks) -> None:
    assert ranks(2).run(_made_alike_again) == [0, 0]


def _watched_anew_at_each_call() -> int:
    drift = _watching(torch.ones(2))

    def freeze(call: int) -> None:
        drift.watch({"layer.weight": torch.full((2,), float(pyrannc.get_rank()))}, {"layer.weight": (0, 1)})
        drift.note_factor(torch.tensor(1.0 + pyrannc.get_rank()))

    return _refused_at(drift, 10, freeze)[0]


def test_factors_are_compared_though_parameters_are_watched_anew(ranks: Ranks) -> None:
    assert ranks(2).run(_watched_anew_at_each_call) == [3, 3]


def _frozen_at_each_call() -> int:
    param = torch.full((2,), float(pyrannc.get_rank()))
    drift = _watching(param)
    watched = {"same": torch.ones(3), "layer.weight": param}
    return _refused_at(drift, 10, lambda call: drift.watch(watched, dict.fromkeys(watched, (0, 1))))[0]


def test_copies_are_compared_though_they_are_watched_anew(ranks: Ranks) -> None:
    assert ranks(2).run(_frozen_at_each_call) == [3, 3]


def _factor(of_rank_1: float) -> int:
    drift = _watching(torch.ones(2))
    drift.note_factor(torch.tensor(of_rank_1 if pyrannc.get_rank() else 0.1))
    return _refused_at(drift, 10)[0]


@pytest.mark.parametrize(("of_rank_1", "call"), [(0.1, 0), (0.1000001, 0), (0.1001, 3), (math.nan, 3)])
def test_factors_may_differ_by_rounding(of_rank_1: float, call: int, ranks: Ranks) -> None:
    assert ranks(2).run(_factor, of_rank_1) == [call, call]


def _now_and_then(every: int) -> int:
    """One step in so many begins otherwise on one rank."""
    drift = _watching(torch.ones(2))

    def begin(call: int) -> None:
        weight = 2.0 if call % every == every - 2 and pyrannc.get_rank() else 1.0
        drift.note_factor(torch.tensor(weight, dtype=torch.bfloat16))

    return _refused_at(drift, 30, begin)[0]


@pytest.mark.parametrize(("every", "call"), [(4, 5), (10, 14)])
def test_a_factor_that_differs_in_some_steps_is_told(every: int, call: int, ranks: Ranks) -> None:
    assert ranks(2).run(_now_and_then, every) == [call, call]


def _of_other_ranks() -> int:
    param = torch.full((4,), float(pyrannc.get_rank()))
    return _refused_at(_watching(param, (pyrannc.get_rank(),)), 10)[0]


def test_ranks_of_different_stages_have_nothing_in_common(ranks: Ranks) -> None:
    assert ranks(2).run(_of_other_ranks) == [0, 0]


def _with_another_default_device() -> list[float]:
    with torch.device("meta"):
        return Sent(torch.ones(2, device="cpu")).arrived().tolist()


def test_numbers_arrive_on_the_host_whatever_the_default_device() -> None:
    assert _with_another_default_device() == [1.0, 1.0]


def _trained_beside(seeded_by_rank: bool, several: bool) -> list[str]:
    """What is told of a layer behind the model, trained by an optimizer of its own."""
    rank = pyrannc.get_rank()
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)
    # Ranks need not have the same ones.
    spare = [nn.Linear(3, 2 + rank) for _ in range(1 + rank)] if several else []
    kept = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in spare]
    own = torch.optim.SGD(body.parameters(), lr=0.1)
    others = torch.optim.Adam(head.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(body, own)
    torch.manual_seed(rank if seeded_by_rank else 0)
    with patch.object(drift._log, "warning") as told:
        for _ in range(14):
            head(model(torch.randn(3, 4))).square().mean().backward()
            for layer in spare:
                layer(torch.ones(3)).sum().backward()
            for optimizer in (own, others, *kept):
                optimizer.step()
                optimizer.zero_grad()
    return [text for text in map(str, told.call_args_list) if "was not given" in text]


@pytest.mark.parametrize("several", [False, True])
def test_layers_beside_the_model_that_ranks_train_apart_are_told_of_once(several: bool, ranks: Ranks) -> None:
    first, other = ranks(2).run(_trained_beside, True, several, env={"RANNC_PROFILE": "never"})
    assert (len(first), other) == (1, [])


def _temperature() -> list[str]:
    """What is told of a plain tensor that each rank trains by its own rows, as soft actor-critic its temperature."""
    torch.manual_seed(0)
    policy, temperature = nn.Linear(4, 4), torch.zeros((), requires_grad=True)
    own = torch.optim.SGD(policy.parameters(), lr=0.1)
    others = torch.optim.Adam([temperature], lr=0.1)
    model = pyrannc.RaNNCModule(policy, own)
    torch.manual_seed(pyrannc.get_rank())
    with patch.object(drift._log, "warning") as told:
        for _ in range(8):
            errors = model(torch.randn(3, 4)).square().mean(1)
            (temperature.exp().detach() * errors).mean().backward()
            (temperature.exp() * (0.5 - errors.detach())).mean().backward()
            for optimizer in (own, others):
                optimizer.step()
                optimizer.zero_grad()
    return [text for text in map(str, told.call_args_list) if "was not given" in text]


def test_a_tensor_beside_the_model_that_ranks_train_apart_is_told_of(ranks: Ranks) -> None:
    first, other = ranks(2).run(_temperature, env={"RANNC_PROFILE": "never"})
    assert (len(first), other) == (1, [])


def test_layers_beside_the_model_that_stay_alike_are_let_be(ranks: Ranks) -> None:
    assert ranks(2).run(_trained_beside, False, True, env={"RANNC_PROFILE": "never"}) == [[], []]
