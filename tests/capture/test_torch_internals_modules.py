"""The same of modules, structures, storages and devices, and of functions that are replaced during a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.capture.tracing import X, fake_mode, targets, traced
from torch import Tensor, fx, nn
from torch._export.wrappers import allow_in_pre_dispatch_graph
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pyrannc.capture import torch_internals as internals
from pyrannc.errors import RaNNCError


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


def test_leads_nowhere() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        made = weight[:1]
    assert made.requires_grad, "torch says so of a view"
    assert internals.leads_nowhere(made)
    assert not internals.leads_nowhere(weight[:1])
    assert not internals.leads_nowhere(torch.ones(2)[:1])


def test_all_digits() -> None:
    """Also where an earlier switch has been set, and none is touched that is precise as it is."""
    backends: Any = torch.backends
    kinds = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    kinds += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]

    def found() -> list[str]:
        return [kind.fp32_precision for kind in kinds]

    before = found()
    backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        kept = found()
        with internals.all_digits():
            assert set(found()) <= {"none", "ieee"}
        assert found() == kept
    finally:
        backends.mkldnn.matmul.fp32_precision = "none"
    with internals.all_digits():
        pass
    assert found() == before


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_older_switches_can_be_read_where_all_digits_count(precision: str) -> None:
    backends: Any = torch.backends

    def older() -> tuple[bool, bool, str]:
        with backends.cudnn.flags(enabled=False):
            pass
        return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    kinds = [backends.cuda.matmul, backends.mkldnn.matmul]
    before = [kind.fp32_precision for kind in kinds]
    torch.set_float32_matmul_precision(precision)
    try:
        kept = older()
        with internals.all_digits():
            assert older() == (False, False, "highest")
        assert older() == kept
    finally:
        torch.set_float32_matmul_precision("highest")
        for kind, found in zip(kinds, before, strict=True):
            kind.fp32_precision = found


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


def test_is_compiled() -> None:
    assert internals.is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not internals.is_compiled(nn.Linear(2, 2))


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


class ForExport(Twice):
    @classmethod
    @allow_in_pre_dispatch_graph
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        return super().apply(*args, **kwargs)


def test_functions_as_operators() -> None:
    def graph() -> list[Any]:
        with internals.compiling_state():
            return targets(traced(lambda x: ForExport.apply(x + 1), X))

    assert any(isinstance(target, internals.HigherOrderOperator) for target in graph())
    with internals.functions_as_operators():
        assert not any(isinstance(target, internals.HigherOrderOperator) for target in graph())


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x + 1


def test_SCRIPT_CALL() -> None:
    assert calls_seen(internals.SCRIPT_CALL, lambda: scripted(X)) == 1


def test_CONTROL_FLOW() -> None:
    branch, loop = internals.CONTROL_FLOW
    assert calls_seen(branch, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,))) == 1
    counted = (torch.tensor(0), X)
    assert calls_seen(loop, lambda: torch.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + 1), counted)) == 1


def test_COMPILE() -> None:
    assert calls_seen(internals.COMPILE, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,))) == 1


def test_COND() -> None:
    with internals.COMPILE.replaced_by(lambda function, **_: function):
        assert calls_seen(internals.COND, lambda: torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,)))


def test_WHILE_LOOP() -> None:
    counted = (torch.tensor(0), X)
    with internals.COMPILE.replaced_by(lambda function, **_: function):
        loop = lambda: torch.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + 1), counted)  # noqa: E731
        assert calls_seen(internals.WHILE_LOOP, loop)


def _sloped(score: Tensor, _b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - (i - j).abs()


def test_FLEX_ATTENTION() -> None:
    heads = torch.randn(2, 1, 3, 4)
    with internals.COMPILE.replaced_by(lambda function, **_: function):
        assert calls_seen(internals.FLEX_ATTENTION, lambda: flex_attention(heads, heads, heads, _sloped))


def test_flex_attention_operator() -> None:
    heads = torch.randn(2, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu").as_tuple()
    found = internals.flex_attention_operator(heads, heads, heads, _sloped, blocks, 0.5, {}, (), ())
    distances = (torch.arange(3).unsqueeze(1) - torch.arange(3)).abs()
    scores = (heads @ heads.mT * 0.5 - distances).masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    expected = scores.softmax(-1) @ heads
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(*(torch.autograd.grad(item.sin().sum(), heads)[0] for item in (found[0], expected)))


def test_flex_attention_results() -> None:
    query, value = torch.randn(2, 5, 3, 4).transpose(1, 2), torch.randn(2, 3, 5, 8)
    attended, total, largest = internals.flex_attention_results(query, value)
    assert attended.shape == (2, 3, 5, 8)
    assert attended.transpose(1, 2).is_contiguous()
    assert total.shape == largest.shape == (2, 3, 5)
    assert total.dtype == largest.dtype == torch.float32


def test_lookup() -> None:
    table = torch.randn(3, 4, requires_grad=True)
    place = [torch.tensor(2), torch.tensor(1)]
    found = internals.lookup()(table, place)
    assert found == table[2, 1]
    found.backward()
    assert table.grad is not None
    assert table.grad.nonzero().tolist() == [[2, 1]]


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
