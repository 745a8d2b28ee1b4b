"""What is relied upon of torch's private names in ``modules.py``: a test for each, under its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.capture.tracing import X
from torch import Tensor, nn

from pyrannc.capture.torch_internals import modules, patching
from pyrannc.errors import RaNNCError


def test_reparametrized() -> None:
    layer = nn.Linear(2, 1)
    own, other = layer.weight, torch.zeros(1, 2)
    with modules.reparametrized(layer, {"weight": other}):
        assert layer.weight is other
    assert layer.weight is own
    recurrent = nn.GRU(2, 1)
    others = {name: torch.zeros_like(item) for name, item in recurrent.named_parameters()}
    moved: list[nn.Module] = []
    with patching.FLATTEN_WEIGHTS.replaced_by(lambda layer: moved.append(layer)):
        with modules.reparametrized(recurrent, others):
            assert torch.equal(recurrent(torch.ones(1, 2))[0], torch.zeros(1, 1))
        assert not moved
        recurrent(torch.ones(1, 2))
        assert moved == [recurrent]


def test_own_buffers() -> None:
    module = nn.BatchNorm1d(2)
    with modules.reparametrized(module, {"running_mean": torch.ones(2)}):
        new = module.running_mean = torch.zeros(2)
        assert modules.own_buffers(module).get("running_mean") is new
    assert "weight" not in modules.own_buffers(module)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_has_backward_hooks(register: str) -> None:
    layer = nn.Linear(2, 1)
    assert not modules.has_backward_hooks(layer)
    handle = getattr(layer, register)(lambda *_: None)
    assert modules.has_backward_hooks(layer)
    handle.remove()
    assert not modules.has_backward_hooks(layer)


def test_hooks_of_calls() -> None:
    module = nn.Linear(2, 2)
    assert not any(modules.hooks_of_calls(module))
    module.register_forward_hook(print)
    module.register_forward_pre_hook(repr)
    module.register_full_backward_pre_hook(len)
    assert {hook for hooks in modules.hooks_of_calls(module) for hook in hooks.values()} == {print, repr, len}


def test_hooks_of_all_calls() -> None:
    assert not any(modules.hooks_of_all_calls())
    handle = nn.modules.module.register_module_forward_pre_hook(print)
    assert [list(hooks.values()) for hooks in modules.hooks_of_all_calls() if hooks] == [[print]]
    handle.remove()


def test_own_params() -> None:
    module = nn.Linear(2, 2, bias=False)
    assert modules.own_params(module) == {"weight": module.weight, "bias": None}


def test_own_modules() -> None:
    inner = nn.Linear(2, 2)
    assert modules.own_modules(nn.Sequential(inner)) == {"0": inner}


def test_attribute_access() -> None:
    module = nn.Linear(2, 2)
    reads, writes = [], []
    before = nn.Module.__setattr__
    with modules.attribute_access(lambda _, name: reads.append(name), lambda _, name: writes.append(name)):
        module(X[:, :2])
        module.scale = module.in_features
    assert {"forward", "in_features", "weight"} <= set(reads)
    assert (writes, module.scale) == (["scale"], 2)
    assert nn.Module.__setattr__ is before
    assert "__getattribute__" not in vars(nn.Module)


def test_parse_to() -> None:
    assert modules.parse_to("cpu", torch.float16) == (torch.device("cpu"), torch.float16)
    assert modules.parse_to(torch.float64) == (None, torch.float64)
    assert modules.parse_to(X, non_blocking=True) == (X.device, X.dtype)


def test_is_compiled() -> None:
    assert modules.is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not modules.is_compiled(nn.Linear(2, 2))


def test_compiled_module() -> None:
    module = nn.Linear(2, 2)
    assert modules.compiled_module(torch.compile(module, backend="eager")) is module


def test_drop_compiled_call() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not modules.drop_compiled_call(module)
    compiled = []
    module[0].compile(backend=lambda graph, _: compiled.append(graph) or graph)
    assert modules.drop_compiled_call(module)
    module(X)
    assert not compiled


def test_Dropout() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, modules.Dropout) for kind in kinds)
    assert not issubclass(nn.Linear, modules.Dropout)


def test_NotForDDP() -> None:
    class Own(modules.NotForDDP, nn.Linear):
        pass

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(RaNNCError, match="Own spreads the model over the processes by itself"):
            nn.parallel.DistributedDataParallel(Own(2, 2))
    finally:
        dist.destroy_process_group()


def test_EXTRA_STATE() -> None:
    class Counted(nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            assert state == 3

    net = nn.Sequential(Counted(2, 2))
    assert net.state_dict()[f"0.{modules.EXTRA_STATE}"] == 3
    net.load_state_dict(net.state_dict())


def test_LoadsItself() -> None:
    class Inner(modules.LoadsItself, nn.Module):
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
    class Inner(modules.AppliesItself, nn.Linear):
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
