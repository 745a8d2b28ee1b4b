"""What is relied upon of torch's private names in ``tensors.py``: a test for each, under its own name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.tracing import X, fake_mode
from torch import Tensor, nn

from pyrannc.capture.torch_internals import patching, tensors


def test_DisableTorchFunction() -> None:
    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *args: Any) -> Any:
            raise AssertionError("it was passed")

    with Refusing(), tensors.DisableTorchFunction():
        assert (X + 1).shape == X.shape


def test_version() -> None:
    tensor = torch.ones(2)
    before = tensors.version(tensor)
    tensor.detach().add_(1)
    assert tensors.version(tensor) > before


def test_base_of() -> None:
    tensor = torch.ones(3)
    assert tensors.base_of(tensor[:1]) is tensor
    assert tensors.base_of(tensor) is None


def test_is_view() -> None:
    tensor = torch.ones(2)
    assert tensors.is_view(tensor[:1])
    assert not tensors.is_view(tensor.clone())
    with pytest.raises(RuntimeError, match="view and is being modified inplace"):
        Sliced.apply(torch.ones(2, requires_grad=True)).mul_(2)


def test_leads_nowhere() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        made = weight[:1]
    assert made.requires_grad, "torch says so of a view"
    assert tensors.leads_nowhere(made)
    assert not tensors.leads_nowhere(weight[:1])
    assert not tensors.leads_nowhere(torch.ones(2)[:1])


class Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ones(4)[:2]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_pytree() -> None:
    class Pair:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

    torch.utils._pytree.register_pytree_node(Pair, lambda pair: (list(pair.parts), "note"), lambda made, _: Pair(*made))
    node = tensors.pytree.SUPPORTED_NODES[Pair]
    parts, context = node.flatten_fn(Pair(1, X))
    assert (parts, context) == ([1, X], "note")
    assert node.unflatten_fn(parts, context).parts == (1, X)
    leaves, spec = tensors.pytree.tree_flatten({"a": [1, X], "b": 2})
    assert leaves == [1, X, 2] == tensors.pytree.tree_leaves({"a": [1, X], "b": 2})
    assert tensors.pytree.tree_unflatten(leaves, spec)["b"] == 2
    assert tensors.pytree.tree_map(lambda leaf: leaf + 1, (1, [2])) == (2, [3])
    assert tensors.pytree.tree_map_only(Tensor, lambda _: "tensor", (1, [X])) == (1, ["tensor"])
    assert tensors.pytree.is_namedtuple_instance(torch.ones(2).max(0)) is False
    assert tensors.pytree.is_namedtuple_instance(patching.MODULE_TO)


def test_BesideCompiler() -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    class Watch(tensors.BesideCompiler):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(lambda x: x.exp() + 1, backend=backend)
    with Watch():  # type: ignore[no-untyped-call]
        compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert len(compilations) == 1


def test_TorchDispatchMode() -> None:
    seen = []

    class Watch(tensors.TorchDispatchMode):  # type: ignore[misc,valid-type]
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
    weak = tensors.StorageWeakRef(tensor.untyped_storage())
    view = tensor.view(1, 2)
    del tensor
    assert not weak.expired()
    del view
    assert weak.expired()


def test_refuse_reading() -> None:
    tensor = torch.ones(())
    tensors.refuse_reading(tensor, "it is elsewhere")
    param = nn.Parameter(torch.ones(2, 3))
    param.data = tensor.expand(2, 3)
    assert (param.shape, param.data[0].shape, param.device.type) == ((2, 3), (3,), "cpu")
    for call in (torch.tensor, torch.sum, torch.neg, Tensor.data_ptr, torch.vmap(torch.sum)):
        with pytest.raises(RuntimeError, match=r"^it is elsewhere"):
            call(param)
    param.data = torch.ones(2, 3)
    assert param.sum() == 6


def test_storage_address() -> None:
    mode = fake_mode()
    with mode:
        first, second = torch.ones(2), torch.ones(2)
        addresses = [tensors.storage_address(t.untyped_storage()) for t in (first, first.view(1, 2), second)]
    assert addresses[0] == addresses[1] != addresses[2]


def test_DisableTorchFunctionSubclass() -> None:
    class Refuses(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ValueError(func)

    tensor = X.clone()
    tensor.__class__ = Refuses
    with pytest.raises(ValueError, match="sum"):
        tensor.sum()
    with tensors.DisableTorchFunctionSubclass():
        assert tensor.sum() == X.sum()
        assert tensor.shape == X.shape
    tensor.__class__ = Tensor
    assert tensor.sum() == X.sum()


def test_is_dense() -> None:
    images = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert tensors.is_dense(images)
    assert not tensors.is_dense(images[:, :2])


def test_storage_users() -> None:
    flat = torch.zeros(4)
    alone = tensors.storage_users(flat)
    param = nn.Parameter(torch.zeros(2))
    param.grad = flat[:2]
    assert tensors.storage_users(flat) == alone + 1
    param.grad = None
    assert tensors.storage_users(flat) == alone


def test_tensor_users() -> None:
    param, grad = nn.Parameter(torch.zeros(2)), torch.zeros(2)
    alone = tensors.tensor_users(grad)
    param.grad = grad
    assert tensors.tensor_users(grad) == alone + 1
    param.grad = None
    assert tensors.tensor_users(grad) == alone
