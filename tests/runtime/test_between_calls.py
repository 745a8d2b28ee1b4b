"""What changes between calls is in the next one, as in one process."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn

import pyrannc
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
FORCED = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


class Net(nn.Module):
    """Two layers, and what it is told between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("prior", None)

    def forward(self, x: Tensor, told: Any) -> Tensor:
        factor = told["factor"] if isinstance(told, dict) else told.factor
        y = self.first(x).tanh() * factor + torch.full((6,), 1 / 3)
        return self.second(y if self.prior is None else y * self.prior).square().mean()  # type: ignore[no-any-return]


def losses(case: str, world: int, rank: int) -> list[float]:
    torch.manual_seed(0)
    net = Net().double()
    model: Any = net if world == 1 else pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    told: Any = Counter(factor=3) if case == "counter" else SimpleNamespace(factor=1.0)
    x = torch.randn(8, 4, dtype=torch.float64).chunk(world)[rank]
    found = []
    for step in range(4):
        if case == "argument" and step == 3:
            told.factor = 0.5
        if case == "buffer" and step == 3:
            net.register_buffer("prior", torch.full((6,), 0.5, dtype=torch.float64))
        torch.set_default_dtype(torch.float64 if case == "type" and step == 3 else torch.float32)
        try:
            loss = model(x, told)
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        found.append(loss.item())
    return found


class Longest(nn.Module):
    """Scales by the most steps of any call, as positions whose base grows with them do."""

    def __init__(self, told: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.told, self.longest = told, 4

    def forward(self, x: Tensor) -> Tensor:
        if self.told == "compared" and x.shape[1] > self.longest:
            self.longest = x.shape[1]
        elif self.told == "largest":
            self.longest = max(self.longest, x.shape[1])
        return self.second(self.first(x).tanh() / self.longest).square().mean()  # type: ignore[no-any-return]


def losses_by_length(told: str, world: int, rank: int) -> list[float]:
    torch.manual_seed(0)
    net = Longest(told).double()
    model: Any = net if world == 1 else pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for length in (3, 7, 5, 7, 2, 9, 7, 3):
        loss = model(torch.randn(8, length, 4, dtype=torch.float64).chunk(world)[rank])
        loss.backward()
        found.append(loss.item())
    return [*found, net.longest]


def job_by_length(told: str) -> list[float]:
    return losses_by_length(told, 2, pyrannc.get_rank())


@pytest.mark.parametrize("told", ["compared", "largest"])
def test_the_most_of_all_calls_so_far(told: str, ranks: Ranks) -> None:
    for found in ranks(2).run(job_by_length, told, env=FORCED):
        assert found == pytest.approx(losses_by_length(told, 1, 0), rel=1e-10, abs=0)


def job(case: str) -> list[float]:
    return losses(case, 2, pyrannc.get_rank())


@torch.enable_grad()
def enabled_here() -> bool:
    return torch.is_grad_enabled()


class Asks(nn.Module):
    """Does something else where no gradients are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: Tensor, question: str) -> Tensor:
        y = self.first(x).tanh()
        with torch.no_grad():
            within = torch.is_grad_enabled()
        if question == "mode" and torch.is_grad_enabled() and not within:
            self.seen.mul_(0.5).add_(1)
        if question == "tensor" and not y.requires_grad:
            y = y * 3
        if question == "node" and y.grad_fn is None:
            y = y * 3
        if question == "leaf" and y.is_leaf and not x.grad_fn and x.is_leaf:
            y = y * 3
        if question == "imported" and is_grad_enabled():
            y = y * 3
        with torch.enable_grad():
            if question == "inside" and torch.is_grad_enabled():
                y = y * 2
            made, unmade = self.second(y), self.frozen(y)
        if question == "after" and torch.is_grad_enabled():
            y = y * 7
        if question == "outside" and not y.requires_grad:
            y = y * 3
        if question == "made inside" and (made * 2).grad_fn is None:
            y = y * 3
        if question == "made of frozen" and not unmade.requires_grad:
            y = y * 3
        if question == "made of it" and made.requires_grad and made.grad_fn is not None:
            y = y * 3
        with torch.no_grad(), torch.set_grad_enabled(True):
            if question == "nested" and torch.is_grad_enabled():
                y = y * 2
        if question == "decorated" and enabled_here():
            y = y * 2
        if question == "parameter" and self.first.weight.requires_grad:
            y = y * 5
        return self.second(y * self.seen).square().mean()  # type: ignore[no-any-return]


def losses_by_mode(question: str, world: int, rank: int) -> list[float]:
    torch.manual_seed(0)
    net = Asks().double()
    model: Any = net if world == 1 else pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.randn(8, 4, dtype=torch.float64).chunk(world)[rank]
    found = []
    for trains in (True, False, True, False, False, True):
        with torch.set_grad_enabled(trains):
            loss = model(x, question)
        if trains:
            loss.backward()
        found.append(loss.item())
    return found


def job_by_mode(question: str) -> list[float]:
    return losses_by_mode(question, 2, pyrannc.get_rank())


CHANGING = ["mode", "tensor", "after", "node", "leaf", "imported", "outside", "made inside", "made of frozen"]


@pytest.mark.parametrize("question", [*CHANGING, "made of it", "inside", "nested", "decorated", "parameter"])
def test_a_forward_may_ask_whether_gradients_are_recorded(question: str, ranks: Ranks) -> None:
    for found in ranks(2).run(job_by_mode, question, env=FORCED):
        expected = losses_by_mode(question, 1, 0)
        assert found == pytest.approx(expected, rel=1e-10, abs=0)
        assert (len(set(expected)) > 1) == (question in CHANGING)


@pytest.mark.parametrize("case", ["counter", "argument", "buffer", "type"])
def test_what_changes_between_calls_is_in_the_next_one(case: str, ranks: Ranks) -> None:
    for found in ranks(2).run(job, case, env=FORCED):
        assert found == pytest.approx(losses(case, 1, 0), rel=1e-10, abs=0)


class AsksLate(nn.Module):
    """Imports, as it runs for the first time, a module that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        import late_question

        y = self.layer(x).square().mean()
        return y * 2 if late_question.is_grad_enabled() else y * 3


def late_losses(folder: str) -> tuple[list[float], bool]:
    sys.path.insert(0, folder)
    torch.manual_seed(0)
    net = AsksLate()
    model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.0))
    found = []
    for trains in (False, True, False):
        with torch.set_grad_enabled(trains):
            found.append(float(model(torch.ones(4, 4)).detach()))
    return found, sys.modules["late_question"].is_grad_enabled is torch.is_grad_enabled


def test_a_module_that_is_imported_while_it_is_captured_asks_torch_itself(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "late_question.py").write_text("from torch import is_grad_enabled\n")
    for (off, on, again), is_torchs in ranks(2).run(late_losses, str(tmp_path), env=FORCED):
        assert is_torchs
        assert again == pytest.approx(off)
        assert off == pytest.approx(1.5 * on)
