"""What a capture took for granted and does not hold any more: captured again, followed, or one error on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.call import variants
from pyrannc.job import process
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, environment, local_slice
from .models import WIDTH, Chain, squared_error

Ranks = Callable[[int], RankPool]
ROWS = (3, 2)


class Pair:
    """A model on all ranks and the same in one process, on the same batches.

    Attributes:
        module: RaNNC's; ``model`` is the user's model in it.
        plain: the other.
    """

    def __init__(self, make: Callable[[], nn.Module], differences: Differences, stages: int = 2) -> None:
        torch.manual_seed(0)
        self.plain = make()
        self.model = copy.deepcopy(self.plain)
        self.differences = differences
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.model, self.plain)]
        with environment({"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": "2"}):
            self.module = pyrannc.RaNNCModule(self.model, self.optimizers[0])
        self.number = 0

    def step(self, what: str, *args: Any, shift: float = 0.0, rows: tuple[int, int] = ROWS) -> None:
        """Trains both on a batch and compares outputs and gradients."""
        self.number += 1
        x, y = (
            torch.randn(sum(rows), WIDTH, generator=torch.Generator().manual_seed(self.number + k)) for k in (0, 99)
        )
        x = x + shift
        own = local_slice(rows)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        output, expected = self.module(x[own], *args), self.plain(x, *args)
        self.differences.compare(f"output {what}", output, expected[own])
        squared_error(output, y[own]).backward()
        squared_error(expected, y).backward()
        for name, param in self.plain.named_parameters():
            grad = self.module.get_param_grad(name)
            self.differences.compare(f"gradient of {name} {what}", grad, param.grad)
        for optimizer in self.optimizers:
            optimizer.step()

    def both(self, change: Callable[[nn.Module], Any]) -> None:
        """Does the same to both models."""
        change(self.model)
        change(self.plain)


def told(call: Callable[[], Any]) -> str:
    """The error that a call raises."""
    try:
        call()
    except pyrannc.RaNNCError as error:
        return str(error)
    return "nothing was raised"


@contextmanager
def compared() -> Iterator[Differences]:
    with double_precision():
        yield Differences()


class Knobs(nn.Module):
    """Reads Python attributes of many kinds."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.alpha = 1.0
        self.scales = [1.0, 2.0]
        self.options = {"shift": 0.5}
        self.act = torch.tanh
        self.weight = torch.tensor(2.0)
        self.settings = Settings()
        self.drop = nn.Dropout(0.0)
        self.unread = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x)) * self.alpha + self.options["shift"]
        if hasattr(self, "extra"):
            x = x * 3
        x = self.drop(x) * self.scales[1] * self.weight * self.settings.factor * self.shared
        return self.last(x)  # type: ignore[no-any-return]


class Settings:
    def __init__(self) -> None:
        self.factor = 1.0


def set_weight(model: Any) -> None:
    model.weight = torch.tensor(5.0)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda model: setattr(model, "alpha", 0.25),
    "a list": lambda model: model.scales.__setitem__(1, 7.0),
    "a dict": lambda model: model.options.update(shift=-1.0),
    "a function": lambda model: setattr(model, "act", torch.sigmoid),
    "a tensor": set_weight,
    "a tensor in place": lambda model: model.weight.mul_(2),
    "an object": lambda model: setattr(model.settings, "factor", 3.0),
    "of the class": lambda model: setattr(model, "shared", 4.0),
    "a missing one": lambda model: setattr(model, "extra", None),
    "a sub-module": lambda model: setattr(model, "drop", nn.Identity()),
}


def attributes_change() -> list[str]:
    with compared() as differences:
        pair = Pair(Knobs, differences)
        pair.step("first")
        pair.step("again")
        for what, change in CHANGES.items():
            pair.both(change)
            pair.step(f"after the change of {what}")
        made = pair.module._variants.made
        pair.both(lambda model: setattr(model, "unread", 1))
        pair.step("after the change of what nobody reads")
        differences.compare("captures", (made, pair.module._variants.made), (len(CHANGES) + 1, len(CHANGES) + 1))
        pair.module.undeploy()
        return differences.found


def params_change() -> list[str]:
    with compared() as differences:
        pair = Pair(Chain, differences)
        pair.both(lambda model: model.layers[4].requires_grad_(False))  # type: ignore[union-attr]
        pair.step("frozen at first")
        first = pair.model.get_parameter("layers.0.weight")
        for what, part, flag in [
            ("unfrozen", "layers.4", True),
            ("the first Stage frozen", "layers.0", False),
            ("the first Stage unfrozen", "layers.0", True),
        ]:
            pair.both(lambda model, part=part, flag=flag: model.get_submodule(part).requires_grad_(flag))
            pair.step(what)
        for param in pair.module.parameters():
            param.requires_grad_(False)
        pair.plain.requires_grad_(False)
        x = torch.randn(2, WIDTH)
        differences.demand(not pair.module(x).requires_grad, "all frozen")
        for param in pair.module.parameters():
            param.requires_grad_(True)
        pair.plain.requires_grad_(True)
        pair.step("all unfrozen")
        for _ in range(2):
            for param in [*pair.model.parameters(), *pair.plain.parameters()]:
                param.data = param.data * 0.5
            pair.step("with new data")
        if any(param is first for param in pair.module.parameters(from_global=False)):
            before, first.data = first.data, first.data.float()
        text = told(lambda: pair.module(x))
        differences.demand('"layers.0.weight" was replaced by torch.float32' in text, text)
        if any(param is first for param in pair.module.parameters(from_global=False)):
            first.data = before
        pair.model.layers[0].weight = nn.Parameter(torch.zeros(first.shape))  # type: ignore[index, union-attr]
        text = told(lambda: pair.module(x))
        differences.demand('"layers.0.weight" of the model is another object' in text, text)
        pair.module.undeploy()
        return differences.found


class Branches(nn.Module):
    """Asks its inputs a question."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.last(y if (x.abs().amax(1) < 100).all() else -y)  # type: ignore[no-any-return]


def answers_change() -> list[str]:
    with compared() as differences:
        pair = Pair(Branches, differences)
        pair.step("first")
        pair.step("again")
        x = torch.ones(2, WIDTH)
        text = told(lambda: pair.module(x * 1000 if process.get_rank() == 1 else x))
        differences.demand("asks the batch for Eq(u0, 1)" in text and "test_guards.py" in text, text)
        pair.step("after the error")
        pair.module.undeploy()
        return differences.found


class Shares(nn.Module):
    """Asks a buffer, and no small part of it can stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("share", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 2 if self.share < 1 else x


def buffers_change() -> list[str]:
    with compared() as differences:
        pair = Pair(Shares, differences)
        pair.step("first")
        pair.step("again")
        pair.both(lambda model: model.share.fill_(0.5))
        pair.step("another share")
        pair.both(lambda model: model.share.fill_(1.5))
        pair.step("the same answer")
        pair.module.undeploy()
        return differences.found


class Counts(Shares):
    """Asks a buffer that it has changed."""

    def forward(self, x: Tensor) -> Tensor:
        self.share += 0.25
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 2 if self.share > 1.7 else x


class Begins(Shares):
    """Does something else at its first call, and once it is warm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            x = x * 3
            self.ready.fill_(True)
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 2 if self.calls.item() > 3 else x


def what_buffers_decide_is_followed() -> list[str]:
    with compared() as differences:
        pair = Pair(Begins, differences, stages=1)
        for step in range(6):
            pair.step(f"step {step}")
        pair.both(lambda model: model.ready.fill_(False))
        pair.step("begun again")
        pair.step("after it")
        differences.demand(pair.model.calls == 8, f"{pair.model.calls} calls")
        pair.module.undeploy()
        return differences.found


def changed_buffers_are_asked() -> list[str]:
    with compared() as differences:
        pair = Pair(Counts, differences)
        pair.step("first")
        pair.step("again")
        text = told(lambda: pair.step("another answer"))
        differences.demand("asks buffer 'share' for Eq(u0, 1), and it gives another answer" in text, text)
        pair.both(lambda model: model.share.fill_(1.0))
        pair.step("the same answer")
        pair.module.undeploy()
        return differences.found


def ranks_differ() -> list[str]:
    with compared() as differences:
        pair = Pair(Weighted, differences)
        weight = torch.tensor([2.0] * WIDTH)
        pair.step("first", weight)
        group = pair.optimizers[0].param_groups[0]
        group["lr"] = 0.2 if process.get_rank() == 1 else 0.1
        text = told(lambda: pair.module(torch.ones(2, WIDTH), weight))
        differences.demand('"lr" of group 0 of the optimizer\'s param_groups has another value on rank 1' in text, text)
        group["lr"] = 0.1
        text = told(lambda: pair.module(torch.ones(2, WIDTH), weight + process.get_rank()))
        differences.demand("argument 1 has another value on rank 1" in text, text)
        pair.step("after the errors", weight)
        pair.module.undeploy()
        return differences.found


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Any) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * weight)  # type: ignore[no-any-return]


@contextmanager
def room(values: int) -> Iterator[None]:
    """Captured forms are kept as long as they have so many Values together."""
    before, variants.MOST_VALUES = variants.MOST_VALUES, values
    try:
        yield
    finally:
        variants.MOST_VALUES = before


def numbers_come() -> list[str]:
    with compared() as differences:
        pair = Pair(Weighted, differences)
        for number in range(20):
            pair.step(f"with {number}", 1.0 + number % 18 / 100)
        differences.compare("captures", len(pair.module._variants._by_use), 18)
        with room(0):
            pair.step("with another", 2.0)
        differences.compare("captures without room", len(pair.module._variants._by_use), 16)
        pair.module.undeploy()
        return differences.found


HIDDEN = [1.0]


def first_of(numbers: list[float]) -> Callable[[], float]:
    return lambda: numbers[0]


class Hidden(nn.Module):
    """What it reads no guard sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = first_of(HIDDEN)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x)) * self.factor()
        self.kept = y
        return self.last(y)  # type: ignore[no-any-return]


def unseen_changes() -> list[str]:
    with compared() as differences:
        pair = Pair(Hidden, differences)
        pair.step("first")
        text = told(lambda: pair.model.kept + 1)  # type: ignore[operator]
        differences.demand('the attribute "kept" of the model is set by the forward' in text, text)
        HIDDEN[0] = 2.0
        text = told(lambda: pair.module(torch.ones(2, WIDTH)))
        HIDDEN[0] = 1.0
        differences.demand("computes something else than when it was captured" in text, text)
        pair.step("as before")
        pair.model.first.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
        text = told(lambda: pair.module(torch.ones(2, WIDTH)))
        differences.demand("of sub-module 'first' have changed" in text, text)
        pair.module.undeploy()
        differences.demand(pair.model.kept is None, "undeploy gives the old attribute back")
        return differences.found


@pytest.mark.parametrize(
    "job",
    [
        attributes_change,
        params_change,
        answers_change,
        buffers_change,
        changed_buffers_are_asked,
        what_buffers_decide_is_followed,
        ranks_differ,
        numbers_come,
        unseen_changes,
    ],
    ids=lambda job: job.__name__,
)
def test_guards(job: Callable[[], list[str]], ranks: Ranks) -> None:
    assert ranks(len(ROWS)).run(job) == [[], []]


class Capacity(nn.Module):
    """Sorts rows and puts them back, but for those beyond a number of them."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most = nn.Linear(WIDTH, WIDTH), most

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(-1).argsort()
        made = self.linear(x[order]).relu()[order.argsort()]
        return made * (torch.ones(x.shape[0]).cumsum(0) <= self.most).view(-1, 1)  # type: ignore[no-any-return]


def _with_capacity(most: int) -> nn.Module:
    last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Capacity(most), last)


def _larger_batches(most: int, stages: int) -> tuple[list[str], str]:
    """What differs, and the error of the first call that has one."""
    with compared() as differences:
        pair = Pair(lambda: _with_capacity(most), differences, stages=stages)
        pair.step("of few rows")
        error = told(lambda: pair.step("of more rows than were tried", rows=(80, 70)))
        if error == "nothing was raised":
            pair.step("of few rows again")
    return differences.found, error


@pytest.mark.parametrize(("most", "stages"), [(100, 1), (1000, 1), (1000, 2)])
def test_what_begins_at_a_number_of_rows_is_seen_in_a_larger_batch(most: int, stages: int, ranks: Ranks) -> None:
    for found, error in ranks(2).run(_larger_batches, most, stages):
        assert found == []
        assert error == "nothing was raised"


def test_a_plan_does_not_serve_a_batch_whose_rows_meet(ranks: Ranks) -> None:
    for found, error in ranks(2).run(_larger_batches, 100, 2):
        assert found == []
        assert "together with all rows of the batch" in error
        assert "make it the first one" in error
