"""What is relied upon of torch's private names in ``fakes.py``: a test for each, under its own name."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.capture.tracing import X, fake_mode
from torch import Tensor

from pyrannc.capture.torch_internals import fakes


def test_FakeTensor() -> None:
    assert isinstance(fake_mode().from_tensor(X), fakes.FakeTensor)
    assert not isinstance(X, fakes.FakeTensor)


def test_FakeTensorMode() -> None:
    with fake_mode():
        there = torch.ones(2, 3, device="cuda")
        assert ((there @ there.T).shape, there.device.type) == ((2, 2), "cuda")


def test_TraceMode() -> None:
    ours = fakes.TraceMode().from_tensor(X)
    assert isinstance((ours + 1).fake_mode, fakes.TraceMode)
    assert not isinstance(fake_mode().from_tensor(X).fake_mode, fakes.TraceMode)


def test_unset_fake_temporarily() -> None:
    with fake_mode(), fakes.unset_fake_temporarily():
        assert type(torch.ones(2)) is Tensor


def test_DynamicOutputShapeException() -> None:
    mode = fakes.FakeTensorMode()
    with mode, pytest.raises(fakes.DynamicOutputShapeException):
        mode.from_tensor(X).nonzero()


def test_UnsupportedOperatorException() -> None:
    library = torch.library.Library("pyrannc_test", "DEF")
    library.define("without_rule(Tensor x) -> Tensor")
    library.impl("without_rule", lambda x: x.clone(), "CPU")
    mode = fake_mode()
    with mode, pytest.raises(fakes.UnsupportedOperatorException):
        torch.ops.pyrannc_test.without_rule(mode.from_tensor(X))


def test_fake_tensors_untold(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        caplog.clear()
        with fake_mode() as mode, pytest.raises(RuntimeError):
            mode.from_tensor(X) @ torch.ones(5, 5)
        return [record.message for record in caplog.records if record.name == log.name]

    log = logging.getLogger(fakes.FakeTensorMode.__module__)
    log.addHandler(caplog.handler)
    try:
        assert any("failed while attempting to run meta" in line for line in told())
        with fakes.fake_tensors_untold():
            assert not told()
        assert told()
    finally:
        log.removeHandler(caplog.handler)


def test_known_data() -> None:
    with fake_mode():
        made = torch.tensor(3)
    found = fakes.known_data(made)
    assert isinstance(made, fakes.FakeTensor)
    assert found is not None
    assert (type(found), found.item()) == (Tensor, 3)
    assert fakes.known_data(fake_mode().from_tensor(X)) is None


def test_runs_without_data() -> None:
    seen = []

    def rule(x: Tensor) -> Tensor:
        seen.append(fakes.runs_without_data())
        return x.new_empty(x.shape)

    library = torch.library.Library("pyrannc_test_rule", "DEF")
    library.define("with_rule(Tensor x) -> Tensor")
    library.impl("with_rule", rule, "Meta")
    library.impl("with_rule", rule, "CPU")
    with fake_mode() as mode:
        torch.ops.pyrannc_test_rule.with_rule(mode.from_tensor(X))
    torch.ops.pyrannc_test_rule.with_rule(X)
    assert seen == [True, False]
