"""How often a captured form is held against a capture of a later call, and that what it finds is told."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.call import recaptures
from pyrannc.call.variant import Variant
from pyrannc.errors import RaNNCError
from tests.ranks import RankPool

from .equivalence import environment

Ranks = Callable[[int], RankPool]
CALLS = 24
FACTOR = [1.0]


def of(numbers: list[float]) -> Callable[[], float]:
    return lambda: numbers[0]


class Net(nn.Module):
    """Multiplies by what only a closure knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), of(FACTOR)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * self.factor()  # type: ignore[no-any-return]


def compared(interval: str, share: float, change_at: int) -> tuple[list[int], str]:
    """The calls at which this rank captures again, and what it tells at last.

    Args:
        share: of the time that may go into it.
        change_at: the call before which the model becomes another.
    """
    found, call = list[int](), 0

    def compare(self: Variant, sample: object) -> None:
        found.append(call)
        compare_with(self, sample)  # type: ignore[arg-type]

    compare_with = Variant.compare_with
    with (
        environment({"RANNC_RECAPTURE_INTERVAL": interval}),
        patch.object(Variant, "compare_with", compare),
        patch.object(recaptures, "_SHARE", share),
    ):
        net = Net()
        model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
        try:
            for call in range(1, CALLS + 1):
                FACTOR[0] = 2.0 if call >= change_at else 1.0
                model(torch.ones(4, 4)).backward()
        except RaNNCError as error:
            return found, str(error)
        finally:
            FACTOR[0] = 1.0
            model.undeploy()
    return found, ""


def test_ranks_take_turns_at_each_interval(ranks: Ranks) -> None:
    first, second = ranks(2).run(compared, "4", 1e9, CALLS + 1)
    assert first == ([2, 10, 18], "")
    assert second == ([6, 14, 22], "")


def test_it_takes_a_small_share_of_the_time(ranks: Ranks) -> None:
    """A capture takes longer than all of these calls."""
    first, second = ranks(2).run(compared, "4", 1e-3, CALLS + 1)
    assert first == ([2], "")
    assert second == ([], "")


def test_what_no_guard_sees_is_found_on_all_ranks(ranks: Ranks) -> None:
    for found, text in ranks(2).run(compared, "4", 1e9, 11):
        assert found in ([2, 10], [6, 14])
        assert "the model computes something else than when it was captured" in text


def test_none_at_all(ranks: Ranks) -> None:
    assert ranks(1).run(compared, "0", 1e9, 11) == [([], "")]
