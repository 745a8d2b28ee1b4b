"""What a script may do with parameters and buffers of other ranks, and what it is told of the rest."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from pyrannc.errors import RaNNCError
from pyrannc.store.elsewhere import bring_here, is_elsewhere, send_away
from pyrannc.store.spread_tensor import spread_param

CPU = torch.device("cpu")
REAL = torch.ones(4, 3)


def half_model() -> nn.Sequential:
    """The first layer and all buffers are elsewhere; what is here has gradients."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    net.register_buffer("scale", torch.ones(3))
    net.register_buffer("count", torch.ones((), dtype=torch.long))
    for name, param in net[0].named_parameters("0"):
        send_away(param, "parameter", name, (1,), CPU)
    for name, buffer in net.named_buffers():
        send_away(buffer, "buffer", name, (1, 2, 3), CPU)
    for param in net[1].parameters():
        param.grad = torch.ones_like(param)
    return net


def gradients(net: nn.Module) -> list[Tensor]:
    return [param.grad for param in net.parameters() if param.grad is not None]


READING: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda net, weight: weight.sum(),
    "detach": lambda net, weight: weight.detach(),
    "clone": lambda net, weight: weight.clone(),
    "numpy": lambda net, weight: weight.numpy(),
    "asarray": lambda net, weight: np.asarray(weight),
    "tolist": lambda net, weight: weight.tolist(),
    "cpu": lambda net, weight: weight.cpu(),
    "data": lambda net, weight: weight.data.max().item(),
    "pickle": lambda net, weight: pickle.dumps(weight),
    "data_ptr": lambda net, weight: weight.data_ptr(),
    "storage": lambda net, weight: weight.untyped_storage(),
    "dlpack": lambda net, weight: torch.from_dlpack(weight),
    "format": lambda net, weight: f"{weight.data[0, 0]:.3f}",
    "equal": lambda net, weight: torch.equal(weight, weight),
    "state_dict": lambda net, weight: net.state_dict(),
    "save": lambda net, weight: torch.save(net, io.BytesIO()),
    "deepcopy": lambda net, weight: copy.deepcopy(net),
    "AveragedModel": lambda net, weight: AveragedModel(net),
    "call": lambda net, weight: net(torch.ones(1, 3)),
    "double": lambda net, weight: net.double(),
    "sum with others": lambda net, weight: REAL + weight,
    "copy from": lambda net, weight: REAL.clone().copy_(weight),
    "average": lambda net, weight: REAL.clone().mul_(0.9).add_(weight.data, alpha=0.1),
    "norm of gradient": lambda net, weight: weight.grad.norm(),
    "clip_grad_norm_": lambda net, weight: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
    "clip_grad_norm_ foreach": lambda net, weight: nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True),
    "get_total_norm": lambda net, weight: nn.utils.get_total_norm(gradients(net)),
    "_foreach_norm": lambda net, weight: torch._foreach_norm(gradients(net)),
    "_foreach_mul_": lambda net, weight: torch._foreach_mul_(gradients(net), 0.5),
    "norms stacked": lambda net, weight: torch.stack([grad.norm() for grad in gradients(net)]),
    "penalty": lambda net, weight: sum(param.square().sum() for param in net.parameters()),
    "parameters_to_vector": lambda net, weight: nn.utils.parameters_to_vector(net.parameters()),
    "buffer": lambda net, weight: float(net.scale.mean()),
    "bool of a buffer": lambda net, weight: bool(net.count),
    "index": lambda net, weight: weight.data[torch.tensor([0])],
}


@pytest.mark.parametrize("name", READING)
def test_what_reads_contents_is_refused(name: str) -> None:
    net = half_model()
    with pytest.raises(RaNNCError, match=r"on rank.* 1.*not on rank 0.*Use model\.(state_dict|get_param)"):
        READING[name](net, net[0].weight)


def summed(x: Tensor) -> Tensor:
    return x.sum()


ROUND_THE_GUARD: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.tensor,
    "tensor of a row": lambda tensor: torch.tensor([tensor.view(-1)[0]]),
    "Tensor": lambda tensor: torch.Tensor(tensor) + 1,
    "as_tensor": lambda tensor: torch.as_tensor(tensor, dtype=torch.float64),
    "new_tensor": lambda tensor: torch.ones(1).new_tensor(tensor),
    "as_subclass": lambda tensor: tensor.as_subclass(Tensor) + 1,
    "vmap": torch.vmap(summed),
    "vjp": lambda tensor: torch.func.vjp(summed, tensor),
    "functionalize": torch.func.functionalize(summed),
    "scripted": lambda tensor: torch.jit.script(summed)(tensor),
    "traced": lambda tensor: torch.jit.trace(summed, torch.ones(4, 3))(tensor),
    "to_dlpack": torch.utils.dlpack.to_dlpack,
    "set_": lambda tensor: torch.ones(1).set_(tensor) + 1,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor]),
    "a number of it": lambda tensor: torch.full((2,), tensor.view(-1)[0]),
    "data of another": lambda tensor: swapped(REAL.clone(), tensor) + 1,
    "gradient of an output": lambda tensor: torch.autograd.grad(2 * LEAF, LEAF, tensor)[0] + 1,
    "address": lambda tensor: tensor.__cuda_array_interface__,
}
LEAF = torch.ones(4, 3, requires_grad=True)


def swapped(tensor: Tensor, other: Tensor) -> Tensor:
    tensor.data = other
    return tensor


@pytest.mark.parametrize("name", ROUND_THE_GUARD)
def test_what_goes_round_the_guard_is_refused(name: str) -> None:
    weight = half_model()[0].weight
    divided = nn.Parameter(torch.ones(4, 3))
    spread_param(divided, "0.weight", (0, 1), torch.ones(6), 0)
    for tensor, told in ((weight, "state_dict"), (weight.grad, "get_param_grad"), (divided, "state_dict")):
        with pytest.raises(RuntimeError, match=rf'"0\.weight" is .*cannot read it here. Use model\.{told}'):
            ROUND_THE_GUARD[name](tensor)


SENDING: dict[str, Callable[[Any], Any]] = {
    "P2POp": lambda weight: distributed.P2POp(distributed.isend, weight, 0),
    "all_gather": lambda weight: distributed.all_gather([REAL], weight),
    "all_gather_into_tensor": lambda weight: distributed.all_gather_into_tensor(weight, REAL),
    "all_reduce": lambda weight: distributed.all_reduce(weight),
    "all_reduce_coalesced": lambda weight: distributed.all_reduce_coalesced([weight]),
    "all_to_all": lambda weight: distributed.all_to_all([weight], [REAL]),
    "all_to_all_single": lambda weight: distributed.all_to_all_single(weight, REAL),
    "broadcast": lambda weight: distributed.broadcast(weight, 0),
    "gather": lambda weight: distributed.gather(weight, [REAL], 0),
    "irecv": lambda weight: distributed.irecv(weight, 0),
    "isend": lambda weight: distributed.isend(weight, 1),
    "recv": lambda weight: distributed.recv(weight, 0),
    "reduce": lambda weight: distributed.reduce(weight, 0),
    "reduce_scatter": lambda weight: distributed.reduce_scatter(weight, [REAL]),
    "reduce_scatter_tensor": lambda weight: distributed.reduce_scatter_tensor(REAL, weight),
    "scatter": lambda weight: distributed.scatter(REAL, [weight], 0),
    "send": lambda weight: distributed.send(weight, 1),
}


@pytest.fixture
def alone() -> Iterator[None]:
    """This process in a group of its own."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())  # type: ignore[attr-defined]
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", SENDING)
def test_what_sends_contents_is_refused(name: str, alone: None) -> None:
    weight = half_model()[0].weight
    for tensor, told in ((weight, "state_dict"), (weight.data, "state_dict"), (weight.grad, "get_param_grad")):
        with pytest.raises(RaNNCError, match=rf"dist\.{name}\(\) can neither send .*leave .* out\. model\.{told}"):
            SENDING[name](tensor)


def test_a_method_of_a_group_refuses_what_is_not_here(alone: None) -> None:
    weight, world = half_model()[0].weight, distributed.group.WORLD
    assert world is not None
    calls: list[Callable[[], Any]] = [
        lambda: world.broadcast(weight.data, 0),
        lambda: world.broadcast([weight.data], distributed.BroadcastOptions()),
        lambda: world.allreduce([weight.grad]),
        lambda: world.allgather([[REAL]], [weight.data]),
    ]
    for call in calls:
        with pytest.raises(RaNNCError, match=r"group\.\w+\(\) can neither send .*leave .* out"):
            call()


def test_what_is_here_is_sent(alone: None) -> None:
    half_model()
    sent = REAL.clone()
    distributed.broadcast(sent, 0)
    distributed.all_gather([sent], REAL)
    assert distributed.group.WORLD is not None
    distributed.group.WORLD.broadcast(sent, 0).wait()
    assert torch.equal(sent, REAL)


def test_a_tensor_drawn_of_a_form_is_plain() -> None:
    weight = nn.Parameter(torch.ones(4, 3, 2, 5).to(memory_format=torch.channels_last))
    like = weight.detach().clone()
    send_away(weight, "parameter", "0.weight", (1,), CPU)
    calls: list[Callable[[Tensor], Tensor]] = [
        torch.randn_like,
        lambda tensor: torch.rand_like(tensor, dtype=torch.float64, device="cpu", requires_grad=True),
        lambda tensor: torch.randint_like(tensor, 2, 9, dtype=torch.long),
        lambda tensor: torch.randn_like(tensor, memory_format=torch.contiguous_format),
        lambda tensor: torch.rand_like(input=tensor),
    ]
    for call in calls:
        torch.manual_seed(1)
        expected, state = call(like), torch.get_rng_state()
        torch.manual_seed(1)
        found = call(weight)
        assert type(found) is Tensor
        assert torch.equal(found, expected)
        assert (found.stride(), found.dtype, found.requires_grad) == (
            expected.stride(),
            expected.dtype,
            expected.requires_grad,
        )
        assert torch.equal(torch.get_rng_state(), state)


WRITING: dict[str, Callable[[Any], Any]] = {
    "normal_()": lambda weight: weight.data.normal_(),
    "nn.init.orthogonal_()": nn.init.orthogonal_,
    "nn.init.normal_()": nn.init.normal_,
}


@pytest.mark.parametrize("name", WRITING)
def test_what_writes_new_contents_is_refused(name: str) -> None:
    told = rf"on rank.* 1.*not on rank 0, so {re.escape(name)} cannot write it here. Use model\.load_state_dict"
    with pytest.raises(RaNNCError, match=told):
        WRITING[name](half_model()[0].weight)


ALLOWED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "shape": (lambda net, weight: tuple(weight.shape), (4, 3)),
    "strides": (lambda net, weight: (weight.stride(), weight.is_contiguous()), ((3, 1), True)),
    "device": (lambda net, weight: (weight.device, weight.is_cuda, weight.is_meta), (CPU, False, False)),
    "count": (lambda net, weight: sum(param.numel() for param in net.parameters()), 26),
    "class": (lambda net, weight: isinstance(weight, nn.Parameter), True),
    "hash": (lambda net, weight: weight in {weight}, True),
    "text": (lambda net, weight: '"0.weight" is on rank 1' in str(weight), True),
    "gradient": (lambda net, weight: weight.grad is None, False),
    "gradient set": (lambda net, weight: setattr(weight, "grad", None), None),
    "zero_grad": (lambda net, weight: net.zero_grad(), None),
    "zero_grad to zero": (lambda net, weight: net.zero_grad(set_to_none=False), None),
    "zero_grad of an optimizer": (lambda net, weight: SGD(net.parameters()).zero_grad(), None),
    "zeros of an optimizer": (lambda net, weight: SGD(net.parameters()).zero_grad(set_to_none=False), None),
    "clip_grad_value_": (lambda net, weight: nn.utils.clip_grad_value_(net.parameters(), 0.5), None),
    "clamp_": (lambda net, weight: is_elsewhere(weight.data.clamp_(-1, 1)), True),
    "by hand": (lambda net, weight: setattr(weight, "data", weight.data - 0.1 * weight.grad), None),
    "given": (lambda net, weight: weight.data.copy_(REAL) is not None, True),
    "vector_to_parameters": (lambda net, weight: nn.utils.vector_to_parameters(torch.ones(26), net.parameters()), None),
    "zeros_like": (lambda net, weight: tuple(torch.zeros_like(weight).mul_(0.9).add_(weight.grad).shape), (4, 3)),
    "copies of gradients": (lambda net, weight: is_elsewhere(weight.grad.detach().clone().contiguous()), True),
    "contiguous": (lambda net, weight: weight.contiguous() is weight, True),
    "detach_": (lambda net, weight: weight.grad.detach_() is weight.grad, True),
    "put in place": (lambda net, weight: torch.nan_to_num(weight.grad, out=weight.grad) is weight.grad, True),
    "put out": (lambda net, weight: torch.add(weight.data, 1.0, out=weight.grad) is weight.grad, True),
    "requires_grad_": (lambda net, weight: net.requires_grad_(False)[0].weight.grad, None),
    "hook": (lambda net, weight: weight.register_hook(lambda grad: grad) is not None, True),
    "init": (lambda net, weight: nn.init.zeros_(weight) is weight, True),
    "buffer filled": (lambda net, weight: net.scale.fill_(2) is net.scale, True),
    "loaded": (lambda net, weight: net.load_state_dict({"0.weight": REAL}, strict=False).unexpected_keys, []),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_its_holders_do_is_nothing_here(name: str) -> None:
    call, expected = ALLOWED[name]
    net = half_model()
    assert call(net, net[0].weight) == expected


def test_changes_in_place_are_refused_as_by_torch() -> None:
    net = half_model()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        net[0].weight.add_(1.0)
    with torch.no_grad():
        net[0].weight.add_(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_memory_is_freed_and_the_tensor_comes_back(dtype: torch.dtype) -> None:
    contents = torch.ones(5, 4).to(dtype).t()
    param = nn.Parameter(contents.clone(memory_format=torch.preserve_format), dtype.is_floating_point)
    freed = StorageWeakRef(param.untyped_storage())
    send_away(param, "parameter", "a.b", (1, 2), CPU)
    assert freed.expired()
    assert param.stand_in().is_meta
    assert (param.stride(), param.dtype, param.shape) == ((1, 4), dtype, (4, 5))
    bring_here(param, contents)
    assert type(param) is nn.Parameter
    assert torch.equal(param, contents)
    assert param.grad is None
