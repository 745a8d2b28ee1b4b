"""Stages that run as Spans: the same bits as one long function, in a few functions that equal layers share."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pyrannc._native import Graph
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture import Captured, capture
from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts, StagePart
from tests.runtime.plans import searched_plan

CPU = torch.device("cpu")
ROWS, WIDTH = 4, 8


class Layer(nn.Module):
    """Attention and two linear layers, with dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        x = x + nn.functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.3)
        return x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.3)


class Encoder(nn.Module):
    """Layers with dropout, whose weights are made by Ops, between an embedding and a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embedding(x), torch.exp(self.scale)
        for layer in self.layers:
            x = layer(x) * scale
        self.calls += 1
        with torch.no_grad():
            shift = x.mean(dim=(1, 2), keepdim=True)
        return nn.functional.dropout(x - shift, 0.2).square()


class Noisy(nn.Module):
    """Layers that change their input in place and draw from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        for layer in self.layers:
            x = nn.functional.rrelu(layer(x), training=True)
            x = x + torch.poisson(x.detach().abs())
        return x


def captured_part(model: nn.Module, *inputs: Tensor) -> tuple[Captured, GraphFacts, StagePart]:
    captured = capture(model, inputs, {}, device=CPU, rows=ROWS)
    graph = Graph.from_json(captured.graph_json)
    partition = searched_plan(graph, [1], 1, ROWS).partition(graph)
    (part,) = Parts.from_json(partition.to_json()).stages
    return captured, GraphFacts.from_json(captured.graph_json, graph.row_dims()), part


def run(model: nn.Module, captured: Captured, facts: GraphFacts, part: StagePart, x: Tensor) -> list[Tensor]:
    """Outputs, gradients of parameters and buffers afterwards."""
    randomness = Randomness(CPU)
    randomness.begin(17)
    randomness.at([(0, ROWS)])
    once, each = part.apart()
    first = None if once is None else StageCode(captured, facts, once, CPU, randomness)
    code = StageCode(captured, facts, each, CPU, randomness)
    params = {param.value: model.get_parameter(param.names[0]).detach().requires_grad_() for param in facts.params}
    buffers = {buffer.value: model.get_buffer(buffer.name).clone() for buffer in facts.buffers}
    constants = dict(zip(facts.constants, captured.constants, strict=True))
    with randomness.borrowed():
        state = {**params, **buffers, **constants}
        made = {} if first is None else first(ROWS, state)
        results = made | code(ROWS, {**state, **made, facts.inputs[0]: x})
    outputs = [results[value] for value in part.outputs]
    grads = torch.autograd.grad(sum(output.sum() for output in outputs), list(params.values()))
    return [*outputs, *grads, *buffers.values(), *(results[value] for value in code.updates.values())]


@pytest.mark.parametrize("make", [lambda: Encoder(3), Noisy], ids=["encoder", "noisy"])
def test_spans_give_the_bits_of_one_function(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    x = torch.randn(ROWS, 5, WIDTH)
    before = x.clone()
    captured, facts, part = captured_part(model, x.clone())
    assert len(part.spans) >= 4
    spans = run(model, captured, facts, part, x)
    whole = run(model, captured, facts, replace(part, prologue=None, spans=()), x)
    assert all(torch.equal(one, other) for one, other in zip(spans, whole, strict=True))
    assert torch.equal(x, before)


def test_many_layers_are_a_handful_of_functions() -> None:
    found = []
    for layers in (4, 24):
        captured, facts, part = captured_part(Encoder(layers), torch.randn(ROWS, 5, WIDTH))
        assert len(part.spans) >= layers
        _, each = part.apart()
        found.append(StageCode(captured, facts, each, CPU, Randomness(CPU)).functions)
    few, many = found
    assert few.keys() == many.keys()
    assert len(many) <= 6


def test_what_no_later_span_takes_is_let_go() -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    captured, facts, part = captured_part(model, torch.randn(ROWS, WIDTH))
    code = StageCode(captured, facts, part, CPU, Randomness(CPU))
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if result.shape == (ROWS, WIDTH):
                made.append(weakref.ref(result))
                alive.append(sum(ref() is not None for ref in made))
            return result

    feeds = {param.value: model.get_parameter(param.names[0]).detach() for param in facts.params}
    feeds[facts.inputs[0]] = torch.randn(ROWS, WIDTH)
    with torch.no_grad(), Watch():
        code(ROWS, feeds)
    gc.collect()
    assert len(made) >= 4
    assert max(alive) <= 2


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(row) / (1 + row.abs().sum()))(self.linear(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class WithoutGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        with torch.no_grad():
            scale = torch.tanh(x)
        return x * scale


class InAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = self.layer(x.unsqueeze(1))[0]
        return made.float()


class _Fails(torch.utils._python_dispatch.TorchDispatchMode):
    """Memory runs out in an operator."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._name = name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self._name in str(func):
            raise torch.OutOfMemoryError("simulated")
        return func(*args, **(kwargs or {}))


def _open() -> list[object]:
    """What of torch's state in this thread a region changes."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return [nesting, torch.is_autocast_enabled("cpu"), functorch_is_active(), torch.is_grad_enabled()]


@pytest.mark.parametrize(
    ("make", "operator", "ends"),
    [(Mapped, "tanh", True), (WithoutGradients, "tanh", True), (InAutocast, "rnn", True), (Plain, "tanh", False)],
)
def test_an_error_leaves_no_region_open(make: Callable[[], nn.Module], operator: str, ends: bool) -> None:
    model = make()
    captured, facts, part = captured_part(model, torch.randn(ROWS, WIDTH))
    code = StageCode(captured, facts, part, CPU, Randomness(CPU))
    feeds = {param.value: model.get_parameter(param.names[0]) for param in facts.params}
    feeds |= dict(zip(facts.constants, captured.constants, strict=True))
    feeds[facts.inputs[0]] = torch.randn(ROWS, WIDTH)
    before = _open()
    with pytest.raises(torch.OutOfMemoryError), _Fails(operator):
        code(ROWS, feeds)
    assert _open() == before
    # What opens none costs nothing.
    assert any(hasattr(function.call, "__wrapped__") for function in code.functions.values()) == ends


class DrawsElsewhere(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


@pytest.mark.parametrize(("make", "others"), [(Noisy, False), (lambda: nn.Sequential(DrawsElsewhere(), Plain()), True)])
def test_generators_of_others_are_lent_where_something_draws_from_them(
    make: Callable[[], nn.Module], others: bool
) -> None:
    captured, facts, part = captured_part(make(), torch.randn(ROWS, WIDTH))
    code = StageCode(captured, facts, replace(part, prologue=None, spans=()), CPU, Randomness(CPU))
    assert code.seeds_generator
    assert code.seeds_others == others
    before, state = random.getstate(), torch.get_rng_state()
    with Randomness(CPU).borrowed(others=code.seeds_others):
        random.random()
        torch.rand(())
    assert (random.getstate() == before) == others
    assert torch.equal(torch.get_rng_state(), state)
