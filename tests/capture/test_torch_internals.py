"""What pyrannc relies on of torch's private names of traces and operators: a test for each, under its own name."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.capture.tracing import X, fake_mode, targets, traced
from tests.ranks import run_ranks
from torch import Tensor, fx, nn

from pyrannc.capture import torch_internals as internals


def test_safe_softmax() -> None:
    scores = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]], dtype=torch.float64, requires_grad=True)
    found = internals.safe_softmax(scores)
    assert found.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    (grad,) = torch.autograd.grad(found[:, 0].sum(), scores)
    assert grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_assert_on_device() -> None:
    internals.assert_on_device(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        internals.assert_on_device(torch.tensor(False), "not fine")


def test_FakeTensor() -> None:
    assert isinstance(fake_mode().from_tensor(X), internals.FakeTensor)
    assert not isinstance(X, internals.FakeTensor)


def test_FakeTensorMode() -> None:
    with fake_mode():
        there = torch.ones(2, 3, device="cuda")
        assert ((there @ there.T).shape, there.device.type) == ((2, 2), "cuda")


def test_unset_fake_temporarily() -> None:
    with fake_mode(), internals.unset_fake_temporarily():
        assert type(torch.ones(2)) is Tensor


def test_DynamicOutputShapeException() -> None:
    mode = internals.FakeTensorMode()
    with mode, pytest.raises(internals.DynamicOutputShapeException):
        mode.from_tensor(X).nonzero()


def test_UnsupportedOperatorException() -> None:
    library = torch.library.Library("pyrannc_test", "DEF")
    library.define("without_rule(Tensor x) -> Tensor")
    library.impl("without_rule", lambda x: x.clone(), "CPU")
    mode = fake_mode()
    with mode, pytest.raises(internals.UnsupportedOperatorException):
        torch.ops.pyrannc_test.without_rule(mode.from_tensor(X))


def test_fake_tensors_untold(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> list[str]:
        caplog.clear()
        with fake_mode() as mode, pytest.raises(RuntimeError):
            mode.from_tensor(X) @ torch.ones(5, 5)
        return [record.message for record in caplog.records if record.name == log.name]

    log = logging.getLogger(internals.FakeTensorMode.__module__)
    log.addHandler(caplog.handler)
    try:
        assert any("failed while attempting to run meta" in line for line in told())
        with internals.fake_tensors_untold():
            assert not told()
        assert told()
    finally:
        log.removeHandler(caplog.handler)


def test_known_data() -> None:
    with fake_mode():
        made = torch.tensor(3)
    found = internals.known_data(made)
    assert isinstance(made, internals.FakeTensor)
    assert found is not None
    assert (type(found), found.item()) == (Tensor, 3)
    assert internals.known_data(fake_mode().from_tensor(X)) is None


def test_trace_before_dispatch() -> None:
    constant = torch.ones(2)
    gm = traced(lambda x: nn.functional.linear(x, constant.expand(2, 2)).reshape(-1), X)
    # Composite operators stay whole, tensors from outside are constants, and every node knows its value.
    assert torch.ops.aten.linear.default in targets(gm)
    assert torch.ops.aten.reshape.default in targets(gm)
    (held,) = [node for node in gm.graph.nodes if node.op == "get_attr"]
    assert getattr(gm, str(held.target)) is constant
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")


def test_current_tracer() -> None:
    found = []

    def call(x: Tensor) -> Tensor:
        found.append(internals.current_tracer())
        assert [node.op for node in found[0].graph.nodes] == ["placeholder"]
        return x + 1

    traced(call, X)
    assert isinstance(found[0], fx.Tracer)
    assert internals.current_tracer() is None


def test_disable_proxy_modes_tracing() -> None:
    def call(x: Tensor) -> Tensor:
        with internals.disable_proxy_modes_tracing():
            x.exp()
        return x + 1

    assert targets(traced(call, X)) == [torch.ops.aten.add.Tensor]


def test_SYMBOLIC() -> None:
    def call(x: Tensor) -> Tensor:
        size = x.shape[0]
        assert [type(item) for item in (size, size / 2, size > 5)] == list(internals.SYMBOLIC)
        return x

    traced(call, X)


def test_proxy_of() -> None:
    def call(x: Tensor) -> Tensor:
        y = x + 1
        tracer = internals.current_tracer()
        proxy, size = internals.proxy_of(y, tracer), internals.proxy_of(y.shape[0], tracer)
        assert proxy is not None
        assert size is not None
        assert proxy.node.target is torch.ops.aten.add.Tensor
        assert size.node.target is torch.ops.aten.sym_size.int
        assert internals.proxy_of(3, tracer) is None
        return y

    traced(call, X)


def opaque(x: Tensor) -> Tensor:
    return x


def test_track() -> None:
    def call(x: Tensor) -> Tensor:
        tracer = internals.current_tracer()
        with internals.disable_proxy_modes_tracing():
            result = x.exp()
        proxy = tracer.create_proxy("call_function", opaque, (internals.proxy_of(x, tracer),), {})
        internals.track(result, proxy, tracer)
        return result + 1

    assert targets(traced(call, X)) == [opaque, torch.ops.aten.add.Tensor]


def test_note_new_nodes() -> None:
    noted: list[fx.Node] = []

    def call(x: Tensor) -> Tensor:
        internals.note_new_nodes(internals.current_tracer().graph, noted.append)
        return x.sin() + 1

    gm = traced(call, X)
    assert {node.target for node in noted} >= set(targets(gm))


def test_non_strict_functions() -> None:
    mode = fake_mode()
    x = internals.fake_of(mode, "x", X, 1)
    with mode, internals.non_strict_functions():
        assert x[: x.shape[0] - 1].shape[0] == x.shape[0] - 1


def test_override_builtin_ops() -> None:
    mode = fake_mode()
    rows = internals.fake_of(mode, "x", X, 1).shape[0]
    original = math.pow
    with mode, internals.override_builtin_ops():
        larger = max(rows, 1)
        assert math.pow is not original
    assert larger is rows or isinstance(larger, torch.SymInt)
    assert math.pow is original


def test_compiling_state() -> None:
    with internals.compiling_state():
        assert torch.compiler.is_compiling()
        assert torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


def test_not_compiling() -> None:
    with internals.compiling_state():
        with internals.not_compiling():
            assert not torch.compiler.is_compiling()
        assert torch.compiler.is_compiling()


def test_tracing_context() -> None:
    from torch._guards import TracingContext, detect_fake_mode

    mode = fake_mode()
    with internals.tracing_context(mode):
        assert detect_fake_mode() is mode
    assert TracingContext.try_get() is None


def test_fake_of() -> None:
    mode = fake_mode()
    first, second = (internals.fake_of(mode, name, X, 1) for name in "xy")
    fixed = internals.fake_of(mode, "z", X, 0)
    parameter = internals.fake_of(mode, "p", nn.Parameter(X), 0)
    assert isinstance(first.shape[0], torch.SymInt)
    # Equal extents are one symbol: there is one batch.
    assert internals.expression(first.shape[0]) == internals.expression(second.shape[0])
    assert (first.shape[1], tuple(fixed.shape)) == (2, (3, 2))
    assert isinstance(parameter, nn.Parameter)


def test_fake_of_free_lengths() -> None:
    mode = fake_mode()
    x, y = torch.zeros(3, 5), torch.zeros(5, 2, 3, 6)
    first, second = internals.fake_of(mode, "x", x, 1, {1}), internals.fake_of(mode, "y", y, 0, {0, 3})
    rows, length = map(internals.expression, first.shape)
    assert rows != length
    assert internals.expression(second.shape[0]) == length
    assert second.shape[1:3] == (2, 3)
    assert internals.expression(second.shape[3]) not in (rows, length)
    packed = internals.fake_of(mode, "packed", torch.zeros(6, 5), 2, {1})
    assert list(map(internals.expression, packed.shape)) == [2 * rows, length]


def test_fake_of_packed_rows() -> None:
    mode = fake_mode()
    first = internals.fake_of(mode, "x", X, 1)
    packed = internals.fake_of(mode, "packed", X.repeat_interleave(4, 0).requires_grad_(), 4)
    assert internals.expression(packed.shape[0]) == 4 * internals.expression(first.shape[0])
    assert packed.requires_grad
    assert packed.is_leaf
    turned = internals.fake_of(mode, "turned", torch.zeros(5, 12).T, 4)
    assert internals.expression(turned.stride()[1]) == internals.expression(packed.shape[0])
    assert internals.expression(turned.shape[0] // 4) == internals.expression(first.shape[0])


class Asked(internals.ShapeQuestions):
    asked, watched = 0, 0
    taken: Any = None

    def granted(self, symbol: Any, size: Any) -> None:
        self.taken = size

    def answer(self, expr: Any) -> Any:
        self.asked += 1
        return expr.subs(dict.fromkeys(expr.free_symbols, 1))

    def answered(self, expr: Any) -> None:
        self.watched += 1


def test_ShapeQuestions() -> None:
    env = Asked()
    mode = internals.FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

    def call(x: Tensor) -> Tensor:
        rows, symbol = x.shape[0], internals.expression(x.shape[0])
        assert x + 1 is not None
        assert not env.is_fixed(symbol)
        branch = x * 2 if (x > 0).all() else x * 3
        assert env.asked == 1
        assert rows == 3
        assert env.is_fixed(symbol)
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


def test_forget_new_sizes() -> None:
    mode = fake_mode()
    with mode:
        fake = mode.from_tensor(X)
        fake[fake > 0]
        assert mode.shape_env.pending_fresh_unbacked_symbols
        internals.forget_new_sizes(mode)
    assert not mode.shape_env.pending_fresh_unbacked_symbols


def test_expression() -> None:
    size = internals.fake_of(fake_mode(), "x", X, 1).shape[0]
    symbol = internals.expression(size)
    assert internals.expression(size * 2 + 1) == 2 * symbol + 1


def test_simplified() -> None:
    mode = fake_mode()
    size = internals.fake_of(mode, "x", X, 1).shape[0]
    twice = size * 2
    assert internals.simplified(twice) == internals.expression(twice)
    assert size == 3
    assert internals.simplified(twice) == 6


def test_symbolic_integer() -> None:
    mode = fake_mode()
    symbol = internals.expression(internals.fake_of(mode, "x", X, 1).shape[0])
    made = internals.symbolic_integer(mode, 2 * symbol + 1, 7)
    assert (internals.expression(made), internals.hint(made)) == (2 * symbol + 1, 7)


def test_NUMBER_REPRS() -> None:
    rows = internals.fake_of(fake_mode(), "x", X, 1).shape[0]
    for point, number in zip(internals.NUMBER_REPRS, (rows, rows / 2, rows > 7), strict=True):
        assert isinstance(number, point.owner)
        with point.replaced_by(lambda number: "seen"):
            assert (f"{number}", repr(number)) == ("seen", "seen")


def test_hint() -> None:
    assert internals.hint(internals.fake_of(fake_mode(), "x", X, 1).shape[0] * 2) == 6


def test_OpOverload() -> None:
    assert all(isinstance(target, internals.OpOverload) for target in targets(traced(lambda x: x.sin() + 1, X)))


def test_HigherOrderOperator() -> None:
    gm = traced(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X)
    assert any(isinstance(target, internals.HigherOrderOperator) for target in targets(gm))


def test_schema() -> None:
    found = internals.schema(torch.ops.aten.add_.Tensor)
    written, other, alpha = found.arguments
    assert (found.name, found.is_mutable, len(found.returns)) == ("aten::add_", True, 1)
    assert written.alias_info is not None
    assert written.alias_info.is_write
    assert found.returns[0].alias_info is not None
    assert found.returns[0].alias_info.before_set == written.alias_info.before_set
    assert (other.name, other.kwarg_only, alpha.kwarg_only, alpha.default_value) == ("other", False, True, 1)


def test_overload_name() -> None:
    assert internals.overload_name(torch.ops.aten.add_.Tensor) == "Tensor"


def test_SET_GRAD_ENABLED() -> None:
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x + 1
        return y * 2

    assert targets(traced(call, X)).count(internals.SET_GRAD_ENABLED) == 2
    before = torch.is_grad_enabled()
    internals.SET_GRAD_ENABLED(not before)
    assert torch.is_grad_enabled() is not before
    internals.SET_GRAD_ENABLED(before)


def autocast_targets() -> list[Any]:
    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T

    return targets(traced(call, X))


def test_ENTER_AUTOCAST() -> None:
    assert autocast_targets()[0] is internals.ENTER_AUTOCAST


def test_EXIT_AUTOCAST() -> None:
    assert autocast_targets()[-1] is internals.EXIT_AUTOCAST


def test_autocast_kernel() -> None:
    linear, relu = torch.ops.aten.linear.default, torch.ops.aten.relu.default
    assert internals.autocast_kernel(linear, "cpu") is None
    with torch.autocast("cpu", torch.bfloat16):
        kernel = internals.autocast_kernel(linear, "cpu")
        assert kernel is not None
        assert kernel(X, torch.ones(3, 2)).dtype == torch.bfloat16
        assert internals.autocast_kernel(relu, "cpu") is None
        assert internals.autocast_kernel(linear, "cuda") is None


def test_autocast_kernel_calls_the_operator_again_in_the_trace() -> None:
    aten, original = torch.ops.aten, internals.PROXY_CALL.original

    def call(mode: Any, op: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        kernel = internals.autocast_kernel(op, "cpu")
        if kernel is None:
            return original(mode, op, pre_dispatch, args, kwargs)
        with mode:
            return kernel(*args, **kwargs)

    with internals.PROXY_CALL.replaced_by(call), torch.autocast("cpu", torch.bfloat16):
        found = targets(traced(lambda x: torch.mm(x, x.T), X))
    assert found == [aten.numpy_T.default, aten.to.dtype, aten.to.dtype, aten.mm.default]


def test_decomposition() -> None:
    einsum = internals.decomposition(torch.ops.aten.einsum.default)
    assert einsum is not None
    assert torch.equal(einsum("ij->ji", [X]), X.T)
    assert internals.decomposition(torch.ops.aten.mm.default) is None


def test_told_of_no_trace() -> None:
    fake = internals.fake_of(fake_mode(), "x", X, 1)
    with internals.compiling_state(), internals.told_of_no_trace(lambda tensor: tensor.dim() > 1):
        assert not torch.compiler.is_compiling()
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert not isinstance(X, torch._subclasses.FakeTensor)
        assert not isinstance(fake[0], torch._subclasses.FakeTensor)
        assert isinstance(fake[0], internals.FakeTensor)
    assert isinstance(fake[0], torch._subclasses.FakeTensor)


def vmap_names() -> list[str]:
    with internals.compiling_state():
        return [getattr(target, "__name__", "") for target in targets(traced(torch.vmap(torch.sin), X))]


def test_VMAP_BEGIN() -> None:
    assert vmap_names().count(internals.VMAP_BEGIN) == 1


def test_VMAP_END() -> None:
    assert vmap_names().count(internals.VMAP_END) == 1


def test_functorch_is_active() -> None:
    assert not internals.functorch_is_active()

    def call(x: Tensor) -> Tensor:
        assert internals.functorch_is_active()
        return x

    torch.vmap(call)(X)


def test_only_vmap_is_active() -> None:
    assert not internals.only_vmap_is_active()
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(internals.only_vmap_is_active())
        return x.sum()

    torch.vmap(call)(X)
    torch.func.grad(call)(X)
    torch.func.grad(lambda x: torch.vmap(call)(x).sum())(X)
    assert seen == [True, False, False]


def _fails_inside() -> None:
    with internals.vmap_levels_ended():
        torch._C._functorch._vmap_increment_nesting(2, "error")
        assert internals.functorch_is_active()
        raise ValueError("inside")


def test_vmap_levels_ended() -> None:
    with pytest.raises(ValueError, match="inside"):
        _fails_inside()
    assert not internals.functorch_is_active()


def test_without_levels() -> None:
    own = X.clone().requires_grad_()

    def call(x: Tensor) -> Tensor:
        assert not x.requires_grad
        assert internals.without_levels(x) is not x
        assert internals.without_levels(x).requires_grad
        return x

    torch.vmap(torch.vmap(call))(own)
    assert internals.without_levels(own) is own


def test_DisableTorchFunction() -> None:
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *args: Any) -> Any:
            raise AssertionError("it was passed")

    with Refusing(), internals.DisableTorchFunction():
        assert (X + 1).shape == X.shape


def test_before_groups_end() -> None:
    assert run_ranks(1, _ends) == [["before", "after"]]


def _ends() -> list[str]:
    seen: list[str] = []
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, though torch's types do not say so
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(len(seen)), store), rank=0, world_size=1)
        if not seen:
            internals.before_groups_end(lambda: seen.append("before" if dist.is_initialized() else "too late"))
        dist.destroy_process_group()
    return [*seen, "after"]


def test_runs_without_data() -> None:
    seen = []

    def rule(x: Tensor) -> Tensor:
        seen.append(internals.runs_without_data())
        return x.new_empty(x.shape)

    library = torch.library.Library("pyrannc_test_rule", "DEF")
    library.define("with_rule(Tensor x) -> Tensor")
    library.impl("with_rule", rule, "Meta")
    library.impl("with_rule", rule, "CPU")
    with fake_mode() as mode:
        torch.ops.pyrannc_test_rule.with_rule(mode.from_tensor(X))
    torch.ops.pyrannc_test_rule.with_rule(X)
    assert seen == [True, False]


def test_TENSOR_REPR() -> None:
    with internals.TENSOR_REPR.replaced_by(lambda self, **kwargs: "shown"):
        assert repr(X) == "shown"
    assert repr(X).startswith("tensor(")
