"""Under autocast a Graph has the casts that torch makes, and computes bit for bit what the model does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc.capture import Captured, capture
from pyrannc.capture.nodes.autocast import Autocast, no_autocast
from pyrannc.errors import CaptureError

CPU, ROWS, WIDTH = torch.device("cpu"), 4, 6
BF16, FP16 = torch.bfloat16, torch.float16


def region(enabled: bool = True, dtype: torch.dtype = BF16, **options: Any) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, **options)


class Net(nn.Module):
    def __init__(self, function: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("labels", torch.arange(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def twice(net: Net, x: Tensor) -> Tensor:
    return net.first(torch.tanh(net.first(x)))


def part_in_full(net: Net, x: Tensor) -> Tensor:
    hidden = net.first(x)
    with region(enabled=False):
        hidden = net.last(net.norm(hidden.float()))
    return net.first(hidden)


def products(net: Net, x: Tensor) -> Tensor:
    return torch.einsum("bi,ij->bj", x, net.first.weight) + net.last(x) @ net.last.weight


def attention(net: Net, x: Tensor) -> Tensor:
    heads = net.first(x).view(-1, 1, 2, 3)
    return F.scaled_dot_product_attention(heads, heads.float(), heads).flatten(1)


def losses(net: Net, x: Tensor) -> Tensor:
    scores = net.last(x)
    chosen = x.argmax(1)
    return F.cross_entropy(scores, chosen, reduction="sum") + F.binary_cross_entropy_with_logits(scores, x.sigmoid())


def joined(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.first(x), x], 1) + torch.cat([x, x], 1)


def recurrent(net: Net, x: Tensor) -> Tensor:
    return net.last(net.lstm(x.view(-1, 2, 3).repeat(1, 1, 2))[0].sum(1))


FUNCTIONS = (twice, part_in_full, products, attention, losses, joined, recurrent)


def captured(net: nn.Module, x: Tensor, device: torch.device = CPU) -> Captured:
    return capture(net, (x,), {}, device=device, rows=len(x))


def casts(found: Captured, name: str) -> list[dict[str, Any]]:
    """The casts of a parameter."""
    graph = json.loads(found.graph_json)
    (value,) = (param["value"] for param in graph["params"] if param["name"] == name)
    return [op for op in graph["ops"] if op["target"] == "aten.to.dtype" and op["args"][0] == {"value": value}]


def run(found: Captured, net: Net, x: Tensor) -> Tensor:
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    (made,) = found.gm(*[tensors[name] for name in (*found.params, *found.buffers)], x)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("function", "dtype"),
    # torch has no recurrent layers in float16 on every host.
    [*((function, BF16) for function in FUNCTIONS), *((f, FP16) for f in FUNCTIONS if f is not recurrent)],
)
def test_a_graph_computes_what_the_model_does_bit_for_bit(
    function: Callable[[Net, Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    net, x = Net(function), torch.randn(7, WIDTH)
    # oneDNN has recurrent layers in bfloat16 for some processors only.
    with torch.backends.mkldnn.flags(enabled=False):
        with region(dtype=dtype):
            expected = net(x)
            found = captured(net, torch.randn(ROWS, WIDTH))
        made = run(found, net, x)
    assert made.dtype == expected.dtype
    assert torch.equal(made, expected)
    params = [param for param in net.parameters() if param.requires_grad]
    right = torch.autograd.grad(expected.float().sum(), params, allow_unused=True)
    for mine, theirs in zip(torch.autograd.grad(made.float().sum(), params, allow_unused=True), right, strict=True):
        assert (mine is None) == (theirs is None)
        # Without oneDNN, the gradients of a recurrent layer's steps are added up in bfloat16, in any order.
        rounding = 2**-6 if function is recurrent else 0.0
        assert mine is None or torch.allclose(mine, theirs, rtol=rounding, atol=rounding / 8)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_what_has_no_casts_is_a_region(function: Callable[[Net, Tensor], Tensor]) -> None:
    with region():
        found = captured(Net(function), torch.randn(ROWS, WIDTH))
    inside = [op["target"] for op in json.loads(found.graph_json)["ops"] if op.get("region") is not None]
    assert [target for target in inside if "autocast" not in target] == ["aten.lstm.input"] * (function is recurrent)


def test_a_parameter_is_cast_once_in_a_region() -> None:
    net, x = Net(twice), torch.randn(ROWS, WIDTH)
    with region():
        assert len(casts(captured(net, x), "first.weight")) == 1
    with region(cache_enabled=False):
        assert len(casts(captured(net, x), "first.weight")) == 2
    net.requires_grad_(False)
    with region():
        assert len(casts(captured(net, x), "first.weight")) == 1
    assert casts(captured(net, x), "first.weight") == []


def test_a_region_inside_gives_what_it_gives_alone() -> None:
    def inside(net: Net, x: Tensor) -> Tensor:
        with region():
            return twice(net, x)

    net, x = Net(inside), torch.randn(ROWS, WIDTH)
    assert torch.equal(run(captured(net, x), net, x), net(x))
    assert len(casts(captured(net, x), "first.weight")) == 1


def test_an_opaque_call_keeps_its_state() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return (grad @ ctx.saved_tensors[0].to(grad.dtype)).float(), None

    torch.manual_seed(0)
    net, x = Net(lambda net, x: Doubled.apply(net.first(x).float(), net.last.weight.detach())), torch.randn(4, WIDTH)
    with region():
        expected, found = net(x), captured(net, x)
    assert expected.dtype == BF16
    assert torch.equal(run(found, net, x), expected)
    assert "under autocast (cpu: bfloat16)" in found.graph_json


@contextmanager
def without_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """What ``torch.autocast("cuda")`` sets where there is a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_casts_for_a_gpu_need_none() -> None:
    with torch.device("meta"):
        net = Net(twice)
    with without_a_gpu(BF16):
        found = captured(net, torch.randn(ROWS, WIDTH), torch.device("cuda", 0))
    graph = json.loads(found.graph_json)
    assert graph["values"][graph["outputs"][0]]["dtype"] == "bfloat16"
    assert len(casts(found, "first.weight")) == 1


def dropping_layers(net: Net, x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.0 else net.first(x)


def test_a_number_may_be_read_in_a_region() -> None:
    with region():
        found = captured(Net(dropping_layers), torch.randn(ROWS, WIDTH))
    assert len(casts(found, "first.weight")) == 1


def test_what_torch_forbids_is_told_with_its_place() -> None:
    net = Net(lambda net, x: F.binary_cross_entropy(net.last(x).sigmoid(), x))
    with without_a_gpu(FP16), pytest.raises(CaptureError, match=r"(?s)unsafe to autocast") as raised:
        captured(net, torch.rand(ROWS, WIDTH), torch.device("cuda", 0))
    assert "test_autocast.py" in str(raised.value)


def test_states() -> None:
    off = Autocast.now()
    assert (str(off), off.dtypes, off.number()) == ("off", (), 0)
    states = []
    for options in ({}, {"dtype": FP16}, {"cache_enabled": False}):
        with region(**options):  # type: ignore[arg-type]
            states.append(Autocast.now())
            with no_autocast():
                assert Autocast.now().dtypes == ()
            assert Autocast.now() == states[-1]
    assert len({state.number() for state in [off, *states]}) == 4
    with states[1].restored():
        assert Autocast.now() == states[1]
        with off.restored():
            assert Autocast.now().dtypes == ()
    assert Autocast.now() == off
