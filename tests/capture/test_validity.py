"""What distributions ask of numbers that a model computes: Ops that ask it, and where none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Beta,
    Categorical,
    Distribution,
    Exponential,
    Gumbel,
    Independent,
    LogNormal,
    Normal,
    StudentT,
    TanhTransform,
    TransformedDistribution,
    constraints,
)

from pyrannc._native import Graph
from pyrannc.capture import Captured, capture
from pyrannc.capture.nodes.validity import as_valid

CPU, ROWS, WIDTH = torch.device("cpu"), 4, 6
Function = Callable[[Tensor, Tensor], Tensor]
ASKS = torch.ops.pyrannc.as_valid.default


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.mean(x), F.softplus(self.spread(x)))


@pytest.fixture(autouse=True)
def _validating() -> Iterator[None]:
    """As where nobody has used torch.compile yet."""
    with patch.object(Distribution, "_validate_args", True):
        yield


def likely(
    around: Callable[[Tensor, Tensor], Distribution], sample: Callable[[Tensor], Tensor] = torch.exp
) -> Function:
    """How likely what is made of a mean is in a distribution."""
    return lambda mean, spread: around(mean, spread).log_prob(sample(mean.detach()))


def _within_one(numbers: Tensor) -> Tensor:
    return numbers.tanh() * 0.9


class _AsksNothing(Normal):
    """One that takes samples for valid by a method of its own."""

    support = constraints.positive

    def _validate_sample(self, value: Tensor) -> None:
        del value

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        return -((value - self.loc) ** 2) / self.scale


class _AsksTwice(Normal):
    """One that asks the same of a sample as a distribution inside of it, and more."""

    def log_prob(self, value: Tensor) -> Tensor:
        self._validate_sample(value)
        return super().log_prob(value) + Exponential(self.scale).log_prob(value)


def _squashed(mean: Tensor, spread: Tensor) -> Tensor:
    """How likely what a transform has made is, which it could not tell from other ones any more."""
    squash = TanhTransform(cache_size=1)
    return TransformedDistribution(Normal(mean, spread), squash).log_prob(squash(mean + 30))


def _corrected(mean: Tensor, spread: Tensor) -> Tensor:
    found = Normal(mean, spread).log_prob(mean.detach())
    found -= mean.square()
    return found


ASKED = {
    "normal": (likely(Normal), 3),
    "standard normal": (lambda mean, spread: Normal(0.0, 1.0).log_prob(mean / spread), 1),
    "categorical": (lambda mean, spread: Categorical(logits=mean).log_prob(spread.argmax(-1)), 2),
    "of several dimensions": (likely(lambda mean, spread: Independent(Normal(mean, spread), 1)), 3),
    "log-normal": (likely(LogNormal), 6),
    "transformed": (likely(lambda m, s: TransformedDistribution(Normal(m, s), TanhTransform()), _within_one), 4),
    "asked by no method of torch": (likely(_AsksNothing), 2),
    "asked of two distributions": (likely(_AsksTwice), 6),
    "of a transform that keeps what it has made": (_squashed, 4),
    "changed in place, while nobody else has it": (_corrected, 3),
    "of what is written down": (lambda mean, _: mean * Gumbel(torch.zeros(()), torch.ones(())).mean, 0),
    "drawn": (lambda mean, spread: Normal(mean, spread).rsample(), 2),
}
"""A function of what a model computes, and how many Ops ask."""


def _changed_behind(mean: Tensor, spread: Tensor) -> Tensor:
    found = Normal(mean, spread)
    mean.mul_(2)
    return found.log_prob(mean.detach())


def _changed_inside(mean: Tensor, spread: Tensor) -> Tensor:
    found = Normal(mean, spread)
    found.loc.mul_(2)
    return found.log_prob(mean.detach())


NOT_ASKED = {
    "changed in place behind it": _changed_behind,
    "changed in place inside of it": _changed_inside,
    "nobody reads it": lambda mean, spread: Normal(mean, spread).mean,
    "another one inside": likely(lambda mean, spread: StudentT(spread, mean)),
    "made of others when it is read": likely(lambda mean, spread: Beta(spread, spread), torch.sigmoid),
    "read before it is asked about": likely(Gumbel),
}


def captured(function: Function) -> tuple[Net, Tensor, Captured]:
    torch.manual_seed(0)
    net, x = Net(function).double(), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    return net, x, capture(net, (x,), {}, device=CPU, rows=ROWS)


@pytest.mark.parametrize("name", ASKED)
def test_questions_become_ops(name: str) -> None:
    function, count = ASKED[name]
    _, _, found = captured(function)
    assert found.kept_whole == ()
    assert sum(node.target is ASKS for node in found.op_nodes) == count
    ops = Graph.from_json(found.graph_json)
    assert all(dim is not None for dim in ops.row_dims()[-1:])


@pytest.mark.parametrize("name", [name for name in ASKED if name != "drawn"])
def test_they_compute_as_the_model(name: str) -> None:
    net, _, found = captured(ASKED[name][0])
    params, x = list(net.parameters()), torch.randn(ROWS + 3, WIDTH, dtype=torch.float64)
    expected, (got,) = net(x), found.gm(*params, x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    right = torch.autograd.grad(expected.sum(), params, allow_unused=True)
    mine = torch.autograd.grad(got.sum(), params, allow_unused=True)
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)


def test_what_is_not_valid_fails() -> None:
    net, x, found = captured(likely(Normal))
    x[2] = torch.nan
    with pytest.raises(ValueError, match=r"loc of torch\.distributions\.Normal at .*test_validity\.py.* is not valid"):
        found.gm(*net.parameters(), x)


@pytest.mark.parametrize("name", NOT_ASKED)
def test_what_no_op_can_ask_stays_whole(name: str) -> None:
    _, _, found = captured(NOT_ASKED[name])
    assert ["validate_args=False" in kept.cause for kept in found.kept_whole] == [True]
    assert not any(node.target is ASKS for node in found.op_nodes)


def test_the_operator_is_as_torch_wants_it() -> None:
    value = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(as_valid, (value, value.detach() < 9, "too large"))
    torch.autograd.gradgradcheck(lambda x: as_valid(x, x.detach() < 9, "too large") * x, value)
