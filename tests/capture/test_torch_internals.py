"""What pyrannc relies on of torch's private names, one test for each, under the name's own name."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import pyrannc
from pyrannc.capture import torch_internals as internals
from pyrannc.errors import RaNNCError

PACKAGE = Path(pyrannc.__file__).parent
FOLDERS = {
    "blocks",
    "calibrate",
    "call",
    "capture",
    "checkpoint",
    "core",
    "face",
    "job",
    "profile",
    "proof",
    "runtime",
    "store",
}
OTHERS_PRIVATE = {"_getframe", "_replace"}
"""Of the standard library: of ``sys``, and of named tuples."""
UNDOCUMENTED = ("torch.fx.experimental", "torch.nn.utils.stateless", "torch.multiprocessing.reductions")


def fake_mode() -> Any:
    return internals.FakeTensorMode(shape_env=internals.ShapeQuestions(), allow_non_fake_inputs=True)


def traced(call: Callable[..., Any], *samples: Tensor, mode: Any = None) -> fx.GraphModule:
    """The trace of a call on fake tensors, dimension 0 of each a symbol."""
    mode = mode or fake_mode()
    fakes = [internals.fake_of(mode, f"x{index}", sample, True) for index, sample in enumerate(samples)]
    with mode:
        return internals.trace_before_dispatch(call, *fakes)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


X = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])


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


def test_NonStrictTorchFunctionHandler() -> None:
    mode = fake_mode()
    x = internals.fake_of(mode, "x", X, True)
    with mode, internals.NonStrictTorchFunctionHandler():
        assert x[: x.shape[0] - 1].shape[0] == x.shape[0] - 1


def test_override_builtin_ops() -> None:
    mode = fake_mode()
    rows = internals.fake_of(mode, "x", X, True).shape[0]
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
    first, second = (internals.fake_of(mode, name, X, True) for name in "xy")
    fixed = internals.fake_of(mode, "z", X, False)
    parameter = internals.fake_of(mode, "p", nn.Parameter(X), False)
    assert isinstance(first.shape[0], torch.SymInt)
    # Equal extents are one symbol: there is one batch.
    assert internals.expression(first.shape[0]) == internals.expression(second.shape[0])
    assert (first.shape[1], tuple(fixed.shape)) == (2, (3, 2))
    assert isinstance(parameter, nn.Parameter)


class Asked(internals.ShapeQuestions):
    asked, watched = 0, 0

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
    size = internals.fake_of(fake_mode(), "x", X, True).shape[0]
    symbol = internals.expression(size)
    assert internals.expression(size * 2 + 1) == 2 * symbol + 1


def test_simplified() -> None:
    mode = fake_mode()
    size = internals.fake_of(mode, "x", X, True).shape[0]
    twice = size * 2
    assert internals.simplified(twice) == internals.expression(twice)
    assert size == 3
    assert internals.simplified(twice) == 6


def test_hint() -> None:
    assert internals.hint(internals.fake_of(fake_mode(), "x", X, True).shape[0] * 2) == 6


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


def test_DisableTorchFunction() -> None:
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *args: Any) -> Any:
            raise AssertionError("it was passed")

    with Refusing(), internals.DisableTorchFunction():
        assert (X + 1).shape == X.shape


def test_foreach_zero_() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    internals.foreach_zero_(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_foreach_mul_() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    internals.foreach_mul_(tensors, 2.0)
    assert all((tensor == 2).all() for tensor in tensors)


def test_reparametrized() -> None:
    layer = nn.Linear(2, 1)
    own, other = layer.weight, torch.zeros(1, 2)
    with internals.reparametrized(layer, {"weight": other}):
        assert layer.weight is other
    assert layer.weight is own


def test_own_buffers() -> None:
    module = nn.BatchNorm1d(2)
    with internals.reparametrized(module, {"running_mean": torch.ones(2)}):
        new = module.running_mean = torch.zeros(2)
        assert internals.own_buffers(module).get("running_mean") is new
    assert "weight" not in internals.own_buffers(module)


def test_EXTRA_STATE() -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            assert state == 3

    net = nn.Sequential(Counted(2, 2))
    assert net.state_dict()[f"0.{internals.EXTRA_STATE}"] == 3
    net.load_state_dict(net.state_dict())


def test_LoadsItself() -> None:
    class Inner(internals.LoadsItself, nn.Module):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            given.update(state_dict)
            return nn.Linear(2, 2).load_state_dict(state_dict, *args, **kwargs)

    given: dict[str, Any] = {}
    outer = nn.Sequential(nn.Linear(2, 2), Inner())
    state = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).state_dict()
    assert not outer.load_state_dict(state).missing_keys
    assert list(given) == ["weight", "bias"]
    del state["1.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"1.bias"'):
        outer.load_state_dict(state)
    state["1.bias"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        outer.load_state_dict(state)


def test_AppliesItself() -> None:
    class Inner(internals.AppliesItself, nn.Linear):
        def applied(self, fn: Callable[[Tensor], Tensor]) -> Any:
            kinds.append(fn(torch.empty(0)).dtype)
            return self

    kinds: list[torch.dtype] = []
    inner = Inner(2, 2)
    outer = nn.Sequential(inner, nn.Linear(2, 2))
    assert inner.half() is inner
    outer.to(torch.bfloat16)
    assert kinds == [torch.float16, torch.bfloat16]
    assert inner.weight.dtype == torch.float32
    assert outer[1].weight.dtype == torch.bfloat16


def test_DisableTorchFunctionSubclass() -> None:
    class Refuses(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError(func)

    tensor = X.clone()
    tensor.__class__ = Refuses
    with pytest.raises(ValueError, match="sum"):
        tensor.sum()
    with internals.DisableTorchFunctionSubclass():
        assert tensor.sum() == X.sum()
        assert tensor.shape == X.shape
    tensor.__class__ = Tensor
    assert tensor.sum() == X.sum()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_has_backward_hooks(register: str) -> None:
    layer = nn.Linear(2, 1)
    assert not internals.has_backward_hooks(layer)
    handle = getattr(layer, register)(lambda *_: None)
    assert internals.has_backward_hooks(layer)
    handle.remove()
    assert not internals.has_backward_hooks(layer)


def test_hooks_of_calls() -> None:
    module = nn.Linear(2, 2)
    assert not any(internals.hooks_of_calls(module))
    module.register_forward_hook(print)
    module.register_forward_pre_hook(repr)
    module.register_full_backward_pre_hook(len)
    assert {hook for hooks in internals.hooks_of_calls(module) for hook in hooks.values()} == {print, repr, len}


def test_hooks_of_all_calls() -> None:
    assert not any(internals.hooks_of_all_calls())
    handle = nn.modules.module.register_module_forward_pre_hook(print)
    assert [list(hooks.values()) for hooks in internals.hooks_of_all_calls() if hooks] == [[print]]
    handle.remove()


def test_tensor_hooks() -> None:
    before, after = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert not any(internals.tensor_hooks(before))
    handle = before.register_hook(lambda grad: grad)
    after.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]  # torch has no types for it
    assert list(map(bool, internals.tensor_hooks(before))) == [True, False]
    assert list(map(bool, internals.tensor_hooks(after))) == [False, True]
    handle.remove()
    assert not any(internals.tensor_hooks(before))


def test_own_params() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert internals.own_params(module) == {"weight": module.weight, "bias": None}


def test_own_modules() -> None:
    inner = nn.Linear(2, 2)
    assert internals.own_modules(nn.Sequential(inner)) == {"0": inner}


def test_attribute_access() -> None:
    module = nn.Linear(2, 2)
    reads, writes = [], []
    before = nn.Module.__setattr__
    with internals.attribute_access(lambda _, name: reads.append(name), lambda _, name: writes.append(name)):
        module(X[:, :2])
        module.scale = module.in_features
    assert {"forward", "in_features", "weight"} <= set(reads)
    assert (writes, module.scale) == (["scale"], 2)
    assert nn.Module.__setattr__ is before
    assert "__getattribute__" not in vars(nn.Module)


def test_version() -> None:
    tensor = torch.ones(2)
    before = internals.version(tensor)
    tensor.detach().add_(1)
    assert internals.version(tensor) > before


def test_is_view() -> None:
    tensor = torch.ones(2)
    assert internals.is_view(tensor[:1])
    assert not internals.is_view(tensor.clone())
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        Sliced.apply(torch.ones(2, requires_grad=True)).mul_(2)


class Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(4)[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_parse_to() -> None:
    assert internals.parse_to("cpu", torch.float16) == (torch.device("cpu"), torch.float16)
    assert internals.parse_to(torch.float64) == (None, torch.float64)
    assert internals.parse_to(X, non_blocking=True) == (X.device, X.dtype)


def test_OptimizedModule() -> None:
    assert isinstance(torch.compile(nn.Linear(2, 2), backend="eager"), internals.OptimizedModule)
    assert not isinstance(nn.Linear(2, 2), internals.OptimizedModule)


def test_compiled_module() -> None:
    module = nn.Linear(2, 2)
    assert internals.compiled_module(torch.compile(module, backend="eager")) is module


def test_drop_compiled_call() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not internals.drop_compiled_call(module)
    compiled = []
    module[0].compile(backend=lambda graph, _: compiled.append(graph) or graph)
    assert internals.drop_compiled_call(module)
    module(X)
    assert not compiled


def test_Dropout() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, internals.Dropout) for kind in kinds)
    assert not issubclass(nn.Linear, internals.Dropout)


def test_NotForDDP() -> None:
    class Own(internals.NotForDDP, nn.Linear):
        pass

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RaNNCError, match="Own spreads the model over the processes by itself"):
            nn.parallel.DistributedDataParallel(Own(2, 2))
    finally:
        dist.destroy_process_group()


def test_pytree() -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch.utils._pytree.register_pytree_node(Pair, lambda pair: (list(pair.parts), "note"), lambda made, _: Pair(*made))
    node = internals.pytree.SUPPORTED_NODES[Pair]
    parts, context = node.flatten_fn(Pair(1, X))
    assert (parts, context) == ([1, X], "note")
    assert node.unflatten_fn(parts, context).parts == (1, X)
    leaves, spec = internals.pytree.tree_flatten({"a": [1, X], "b": 2})
    assert leaves == [1, X, 2] == internals.pytree.tree_leaves({"a": [1, X], "b": 2})
    assert internals.pytree.tree_unflatten(leaves, spec)["b"] == 2
    assert internals.pytree.tree_map(lambda leaf: leaf + 1, (1, [2])) == (2, [3])
    assert internals.pytree.tree_map_only(Tensor, lambda _: "tensor", (1, [X])) == (1, ["tensor"])
    assert internals.pytree.is_namedtuple_instance(torch.ones(2).max(0)) is False
    assert internals.pytree.is_namedtuple_instance(internals.MODULE_TO)


def test_TorchDispatchMode() -> None:
    seen = []

    class Watch(internals.TorchDispatchMode):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(2, requires_grad=True)
    with Watch():
        leaf.exp().sum().backward()
    # Backward passes it too.
    assert torch.ops.aten.exp.default in seen
    assert torch.ops.aten.mul.Tensor in seen


def test_StorageWeakRef() -> None:
    tensor = torch.ones(2)
    weak = internals.StorageWeakRef(tensor.untyped_storage())
    view = tensor.view(1, 2)
    del tensor
    assert not weak.expired()
    del view
    assert weak.expired()


def test_storage_address() -> None:
    mode = fake_mode()
    with mode:
        first, second = torch.ones(2), torch.ones(2)
        addresses = [internals.storage_address(t.untyped_storage()) for t in (first, first.view(1, 2), second)]
    assert addresses[0] == addresses[1] != addresses[2]


def test_sleep_on_gpu() -> None:
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AttributeError, AssertionError)):
            internals.sleep_on_gpu(1)
        return
    event = torch.cuda.Event()
    internals.sleep_on_gpu(1_000_000_000)
    event.record()
    assert not event.query()
    event.synchronize()


def calls_seen(point: internals.PatchPoint, call: Callable[[], Any], static: bool = False) -> int:
    """How often a call comes by a function that stands in for the original."""
    original, seen = point.original, []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return original.__get__(None, args[0])(*args[1:], **kwargs) if static else original(*args, **kwargs)

    with point.replaced_by(classmethod(stand_in) if static else stand_in):
        call()
    assert point.original is original
    return len(seen)


def test_PatchPoint() -> None:
    original = internals.MODULE_TO.original
    with pytest.raises(KeyError), internals.MODULE_TO.replaced_by(None):
        raise KeyError
    assert vars(nn.Module)["to"] is original


def test_MODULE_CALL() -> None:
    assert calls_seen(internals.MODULE_CALL, lambda: nn.Sequential(nn.Identity(), nn.Identity())(X)) == 3


def test_MODULE_TO() -> None:
    assert calls_seen(internals.MODULE_TO, lambda: nn.Linear(1, 1).to(torch.float64)) == 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_FUNCTION_APPLY() -> None:
    assert calls_seen(internals.FUNCTION_APPLY, lambda: Twice.apply(X), static=True) == 1


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x + 1


def test_SCRIPT_CALL() -> None:
    assert calls_seen(internals.SCRIPT_CALL, lambda: scripted(X)) == 1


def test_REGISTER_HOOK() -> None:
    leaf = torch.ones(1, requires_grad=True)
    assert calls_seen(internals.REGISTER_HOOK, lambda: leaf.register_hook(lambda gradient: gradient)) == 1


def test_TRACK_TENSOR_TREE() -> None:
    original, seen = internals.TRACK_TENSOR_TREE.original, {}

    def track(inner: Any, proxy: Any, *, constant: Any, tracer: Any) -> Any:
        result = original(inner, proxy, constant=constant, tracer=tracer)
        if isinstance(proxy, fx.Proxy):  # Autograd is done with the result by then.
            seen[proxy.node.target] = inner.requires_grad
        return result

    with internals.TRACK_TENSOR_TREE.replaced_by(track):
        traced(lambda x: x.detach().sin() + x, X.clone().requires_grad_())
    assert seen[torch.ops.aten.sin.default] is False
    assert seen[torch.ops.aten.add.Tensor] is True


def test_PROXY_CALL() -> None:
    original, seen = internals.PROXY_CALL.original, []

    def proxy_call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        seen.append((func, pre_dispatch, mode.tracer is internals.current_tracer()))
        return original(mode, func, pre_dispatch, args, kwargs)

    with internals.PROXY_CALL.replaced_by(proxy_call):
        traced(lambda x: x.sin(), X)
    assert torch.ops.aten.sin.default in [func for func, _, _ in seen]
    assert all(pre_dispatch for _, pre_dispatch, _ in seen)


def test_every_name_is_tested() -> None:
    defined = {name for name in _defined(ast.parse(Path(internals.__file__).read_text())) if not name.startswith("_")}
    assert len(defined) > 40
    assert {f"test_{name}" for name in defined} <= set(globals())


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines."""
    for statement in tree.body:
        for node in ast.walk(statement) if isinstance(statement, ast.Assign | ast.AnnAssign) else [statement]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def test_no_other_file_names_private_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path.parent.name for path in trees} == FOLDERS | {PACKAGE.name}
    own = {name for tree in trees.values() for name in _own_names(tree)}
    found = {path: sorted(_private(tree, own)) for path, tree in trees.items()}
    assert len(found.pop(Path(internals.__file__))) > 20, "private names are no longer seen"
    assert not {str(path): names for path, names in found.items() if names}


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Names that the file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) in ("self", "cls"):
            yield node.attr


def _private(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a file takes of torch that is not public, or writes into torch."""
    imported = dict(_imports_of_torch(tree))
    for full in imported.values():
        if full.startswith(UNDOCUMENTED) or "._" in full:
            yield full
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        of_torch = _root(node) in imported
        private = node.attr.startswith("_") and not node.attr.endswith("__")
        written = of_torch and isinstance(node.ctx, ast.Store)
        if written or (private and (of_torch or node.attr not in own | OTHERS_PRIVATE)):
            yield f"{ast.unparse(node)} in line {node.lineno}"


def _imports_of_torch(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a file imports of torch: the name here, and the full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        yield from ((name, full) for name, full in names if full.split(".")[0] == "torch")


def _root(node: ast.Attribute) -> str:
    return ast.unparse(node).split(".")[0]
