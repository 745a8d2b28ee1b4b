"""What is relied upon of torch's private names in ``tracing.py``: a test for each, under its own name."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch
from tests.capture.tracing import Twice, X, fake_mode, targets, traced
from torch import Tensor, fx, nn
from torch._export.wrappers import allow_in_pre_dispatch_graph

from pyrannc.capture.torch_internals import fakes, operators, symbols, tracing


def test_trace_before_dispatch() -> None:
    constant = torch.ones(2)
    gm = traced(lambda x: nn.functional.linear(x, constant.expand(2, 2)).reshape(-1), X)
    # Composite operators stay whole, tensors from outside are constants, and every node knows its value.
    assert torch.ops.aten.linear.default in targets(gm)
    assert torch.ops.aten.reshape.default in targets(gm)
    (held,) = [node for node in gm.graph.nodes if node.op == "get_attr"]
    assert getattr(gm, str(held.target)) is constant
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_LazyGraphModule() -> None:
    gm = traced(lambda x: x.sin(), X)
    assert isinstance(gm, tracing.LazyGraphModule)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node.target = torch.ops.aten.cos.default
    assert torch.equal(gm(X), X.cos())


def test_current_tracer() -> None:
    found = []

    def call(x: Tensor) -> Tensor:
        found.append(tracing.current_tracer())
        assert [node.op for node in found[0].graph.nodes] == ["placeholder"]
        return x + 1

    traced(call, X)
    assert isinstance(found[0], fx.Tracer)
    assert tracing.current_tracer() is None


def test_current_tracer_is_of_its_thread() -> None:
    found = []

    def call(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: found.append(tracing.current_tracer()))
        thread.start()
        thread.join()
        return x + 1

    traced(call, X)
    assert found == [None]


def test_disable_proxy_modes_tracing() -> None:
    def call(x: Tensor) -> Tensor:
        with tracing.disable_proxy_modes_tracing():
            x.exp()
        return x + 1

    assert targets(traced(call, X)) == [torch.ops.aten.add.Tensor]


def test_proxy_of() -> None:
    def call(x: Tensor) -> Tensor:
        y = x + 1
        tracer = tracing.current_tracer()
        proxy, size = tracing.proxy_of(y, tracer), tracing.proxy_of(y.shape[0], tracer)
        assert proxy is not None
        assert size is not None
        assert proxy.node.target is torch.ops.aten.add.Tensor
        assert size.node.target is torch.ops.aten.sym_size.int
        assert tracing.proxy_of(3, tracer) is None
        return y

    traced(call, X)


def opaque(x: Tensor) -> Tensor:
    return x


def test_track() -> None:
    def call(x: Tensor) -> Tensor:
        tracer = tracing.current_tracer()
        with tracing.disable_proxy_modes_tracing():
            result = x.exp()
        proxy = tracer.create_proxy("call_function", opaque, (tracing.proxy_of(x, tracer),), {})
        tracing.track(result, proxy, tracer)
        return result + 1

    assert targets(traced(call, X)) == [opaque, torch.ops.aten.add.Tensor]


def test_note_new_nodes() -> None:
    noted: list[fx.Node] = []

    def call(x: Tensor) -> Tensor:
        tracing.note_new_nodes(tracing.current_tracer().graph, noted.append)
        return x.sin() + 1

    gm = traced(call, X)
    assert {node.target for node in noted} >= set(targets(gm))


def test_non_strict_functions() -> None:
    mode = fake_mode()
    x = symbols.fake_of(mode, "x", X, 1)
    with mode, tracing.non_strict_functions():
        assert x[: x.shape[0] - 1].shape[0] == x.shape[0] - 1


def test_override_builtin_ops() -> None:
    mode = fake_mode()
    rows = symbols.fake_of(mode, "x", X, 1).shape[0]
    original = math.pow
    with mode, tracing.override_builtin_ops():
        larger = max(rows, 1)
        assert math.pow is not original
    assert larger is rows or isinstance(larger, torch.SymInt)
    assert math.pow is original


def test_compiling_state() -> None:
    with tracing.compiling_state():
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


def test_not_compiling() -> None:
    with tracing.compiling_state():
        with tracing.not_compiling():
            assert not torch.compiler.is_compiling()
        assert torch.compiler.is_compiling()


def test_tracing_context() -> None:
    from torch._guards import TracingContext, detect_fake_mode

    mode = fake_mode()
    with tracing.tracing_context(mode):
        assert detect_fake_mode() is mode
    assert TracingContext.try_get() is None


def test_told_of_no_trace() -> None:
    fake = symbols.fake_of(fake_mode(), "x", X, 1)
    with tracing.compiling_state(), tracing.told_of_no_trace(lambda tensor: tensor.dim() > 1):
        assert not torch.compiler.is_compiling()
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert not isinstance(X, torch._subclasses.FakeTensor)
        assert not isinstance(fake[0], torch._subclasses.FakeTensor)
        assert isinstance(fake[0], fakes.FakeTensor)
    assert isinstance(fake[0], torch._subclasses.FakeTensor)


class TwiceAsOperator(Twice):
    @classmethod
    @allow_in_pre_dispatch_graph
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        return super().apply(*args, **kwargs)


def test_functions_as_operators() -> None:
    def graph() -> list[Any]:
        with tracing.compiling_state():
            return targets(traced(lambda x: TwiceAsOperator.apply(x + 1), X))

    assert any(isinstance(target, operators.HigherOrderOperator) for target in graph())
    with tracing.functions_as_operators():
        assert not any(isinstance(target, operators.HigherOrderOperator) for target in graph())
