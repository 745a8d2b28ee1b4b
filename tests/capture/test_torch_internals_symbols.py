"""What is relied upon of torch's private names in ``symbols.py``: a test for each, under its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.tracing import X, fake_mode, targets, traced
from torch import Tensor, nn

from pyrannc.capture.torch_internals import fakes, symbols


def test_SYMBOLIC() -> None:
    def call(x: Tensor) -> Tensor:
        size = x.shape[0]
        assert [type(item) for item in (size, size / 2, size > 5)] == list(symbols.SYMBOLIC)
        return x

    traced(call, X)


def test_fake_of() -> None:
    mode = fake_mode()
    first, second = (symbols.fake_of(mode, name, X, 1) for name in "xy")
    fixed = symbols.fake_of(mode, "z", X, 0)
    parameter = symbols.fake_of(mode, "p", nn.Parameter(X), 0)
    assert isinstance(first.shape[0], torch.SymInt)
    # Equal extents are one symbol: there is one batch.
    assert symbols.expression(first.shape[0]) == symbols.expression(second.shape[0])
    assert (first.shape[1], tuple(fixed.shape)) == (2, (3, 2))
    assert isinstance(parameter, nn.Parameter)


def test_fake_of_free_lengths() -> None:
    mode = fake_mode()
    x, y = torch.zeros(3, 5), torch.zeros(5, 2, 3, 6)
    first, second = symbols.fake_of(mode, "x", x, 1, {1}), symbols.fake_of(mode, "y", y, 0, {0, 3})
    rows, length = map(symbols.expression, first.shape)
    assert rows != length
    assert symbols.expression(second.shape[0]) == length
    assert second.shape[1:3] == (2, 3)
    assert symbols.expression(second.shape[3]) not in (rows, length)
    packed = symbols.fake_of(mode, "packed", torch.zeros(6, 5), 2, {1})
    assert list(map(symbols.expression, packed.shape)) == [2 * rows, length]


def test_fake_of_packed_rows() -> None:
    mode = fake_mode()
    first = symbols.fake_of(mode, "x", X, 1)
    packed = symbols.fake_of(mode, "packed", X.repeat_interleave(4, 0).requires_grad_(), 4)
    assert symbols.expression(packed.shape[0]) == 4 * symbols.expression(first.shape[0])
    assert packed.requires_grad
    assert packed.is_leaf
    turned = symbols.fake_of(mode, "turned", torch.zeros(5, 12).T, 4)
    assert symbols.expression(turned.stride()[1]) == symbols.expression(packed.shape[0])
    assert symbols.expression(turned.shape[0] // 4) == symbols.expression(first.shape[0])


class Asked(symbols.ShapeQuestions):
    asked, watched = 0, 0
    taken: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.asked_by: set[tuple[str, bool]] = set()

    def granted(self, symbol: Any, size: Any) -> None:
        self.taken = size

    def answer(self, expr: Any) -> Any:
        self.asked += 1
        return expr.subs(dict.fromkeys(expr.free_symbols, 1))

    def answered(self, expr: Any, answer: Any) -> None:
        self.watched += 1
        self.asked_by.add((symbols.asking(), symbols.is_a_branch()))


def test_ShapeQuestions() -> None:
    env = Asked()
    mode = fakes.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

    def call(x: Tensor) -> Tensor:
        rows, symbol = x.shape[0], symbols.expression(x.shape[0])
        assert x + 1 is not None
        assert not env.is_fixed(symbol)
        branch = x * 2 if (x > 0).all() else x * 3
        assert env.asked == 1
        watched = env.watched
        with env.suppress_guards():
            assert rows == 3
            assert list(range(rows)) == [0, 1, 2]
        assert not env.is_fixed(symbol)
        assert env.watched == watched
        assert rows == 3
        assert env.is_fixed(symbol)
        assert symbols.expression(rows) == 3
        return branch

    assert targets(traced(call, X, mode=mode)).count(torch.ops.aten.mul.Tensor) == 1
    assert env.watched >= 2
    assert [str(condition).partition("(")[0] for condition in env.conditions] == ["Eq"]
    # An operator takes an extent of data for that of what it is added to; one of others is still free.
    traced(lambda x: torch.arange((x > 0).sum()) + torch.arange((x > 1).sum()), X, mode=mode)
    assert env.taken is None
    traced(lambda x: torch.arange((x > 0).sum()) + x[0], X, mode=mode)
    assert env.taken == 2
    # Without an answer, torch's own error stays.
    with pytest.raises(Exception, match="data-dependent"):
        traced(lambda x: x if (x > 0).all() else -x, X)


def asked_by(call: Callable[[Tensor], Any]) -> set[tuple[str, bool]]:
    env = Asked()
    mode = fakes.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    given = symbols.fake_of(mode, "x", X, 1)
    env.asked_by.clear()
    with mode:
        call(given)
    return env.asked_by


def test_asking() -> None:
    assert "aten.slice.Tensor" in {by for by, _ in asked_by(lambda x: x[:2])}
    assert {by for by, _ in asked_by(lambda x: max(x.shape[0], 7))} == {""}


def test_is_a_branch() -> None:
    assert asked_by(lambda x: 1 if x.shape[0] > 5 else 2) == {("", True)}
    assert not any(branch for _, branch in asked_by(lambda x: x[:2]))


def test_expression() -> None:
    size = symbols.fake_of(fake_mode(), "x", X, 1).shape[0]
    symbol = symbols.expression(size)
    assert symbols.expression(size * 2 + 1) == 2 * symbol + 1


def test_simplified() -> None:
    mode = fake_mode()
    size = symbols.fake_of(mode, "x", X, 1).shape[0]
    twice = size * 2
    assert symbols.simplified(twice) == symbols.expression(twice)
    assert size == 3
    assert symbols.simplified(twice) == 6


def test_symbolic_integer() -> None:
    mode = fake_mode()
    symbol = symbols.expression(symbols.fake_of(mode, "x", X, 1).shape[0])
    made = symbols.symbolic_integer(mode, 2 * symbol + 1, 7)
    assert (symbols.expression(made), symbols.hint(made)) == (2 * symbol + 1, 7)


def test_hint() -> None:
    assert symbols.hint(symbols.fake_of(fake_mode(), "x", X, 1).shape[0] * 2) == 6
