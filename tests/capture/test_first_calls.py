"""A first call that changes the model's sub-modules: later calls find others over the same parameters, or none may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BigBirdConfig, BigBirdModel

from pyrannc._native import Graph
from pyrannc.capture import Captured, capture
from pyrannc.capture.computation import compute_the_same
from pyrannc.errors import CaptureError


class Sparse(nn.Module):
    """Attention that no short sequence can have."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("too short")


class Full(nn.Module):
    """What takes its place."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(3, 3)  # drawn
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.query(x)) * self.scale  # type: ignore[no-any-return,operator]


class Attention(nn.Module):
    """Chooses at its first call."""

    def __init__(self, take_over: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.kind = "sparse"
        self.inner: nn.Module = Sparse()
        self.take_over = take_over

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sparse":
            self.kind = "full"
            full = Full()
            self.take_over(full, self.inner)
            self.inner = full  # put
        return self.inner(x)  # type: ignore[no-any-return]


def over_layers(full: Any, sparse: Any) -> None:
    full.query = sparse.query
    full.register_buffer("scale", sparse.scale)


def over_tensors(full: Any, sparse: Any) -> None:
    full.query.weight, full.query.bias = sparse.query.weight, sparse.query.bias
    full.register_buffer("scale", sparse.scale)


def made(take_over: Callable[[Any, Any], None]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(take_over), nn.Linear(3, 2)).double()


def captured(model: nn.Module, rows: int = 4) -> Captured:
    x = torch.ones(rows, 3, dtype=next(model.parameters()).dtype)
    return capture(model, (x,), {}, device=torch.device("cpu"), rows=rows)


def described(model: nn.Module) -> list[Any]:
    """What one call leaves: sub-modules, their plain attributes, what they hold."""
    plain = (bool, int, float, str)
    modules = [
        (path, type(module), module.training, {k: v for k, v in vars(module).items() if isinstance(v, plain)})
        for path, module in model.named_modules()
    ]
    return [*modules, list(model.state_dict()), [name for name, _ in model.named_parameters()]]


@pytest.mark.parametrize("take_over", [over_layers, over_tensors])
@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_as_after_one_call(
    take_over: Callable[[Any, Any], None], training: bool, assert_equals_model: Callable[..., Captured]
) -> None:
    model = made(take_over).train(training)
    plain = copy.deepcopy(model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = torch.get_rng_state()
    once = captured(model)
    assert torch.equal(torch.get_rng_state(), state)
    plain(torch.ones(4, 3, dtype=torch.double))
    assert described(model) == described(plain)
    assert all({**dict(model.named_parameters()), **dict(model.named_buffers())}[name] is held[name] for name in held)
    assert {attribute.path for attribute in once.python_state.read} == {"", "0", "0.inner", "0.inner.drop"} | {
        "0.inner.query", "1"
    }  # fmt: skip
    assert not once.python_state.strangers
    # Now there is nothing left to change.
    again = assert_equals_model(model, lambda rows: ((torch.randn(rows, 3, dtype=torch.double),), {}))
    assert Graph.from_json(again.graph_json).hash() == Graph.from_json(once.graph_json).hash()
    assert '"module":"0.inner.query"' in once.graph_json


def test_parameters_without_data_are_taken_over() -> None:
    with torch.device("meta"):
        model = made(over_layers)
    params = dict(model.named_parameters())
    captured(model)
    assert isinstance(model[0].inner, Full)  # type: ignore[index]
    assert all(param is params[name] and param.is_meta for name, param in model.named_parameters())


def nothing(full: Any, sparse: Any) -> None:
    full.register_buffer("scale", sparse.scale)


def weight_only(full: Any, sparse: Any) -> None:
    full.query.weight = sparse.query.weight
    nothing(full, sparse)


def over_other_names(full: Any, sparse: Any) -> None:
    full.other = sparse.query
    del full.query
    full.query = full.other.forward
    nothing(full, sparse)


def no_buffer(full: Any, sparse: Any) -> None:
    full.query, full.scale = sparse.query, 2.0


def own_buffer(full: Any, sparse: Any) -> None:
    over_layers(full, sparse)
    full.register_buffer("positions", torch.arange(3))


def keeps_tensor(full: Any, sparse: Any) -> None:
    over_layers(full, sparse)
    full.table = {"sin": torch.arange(3).sin()}


@pytest.mark.parametrize(
    ("take_over", "text"),
    [
        (nothing, r"sub-module '0'.*:\d+.* puts another tensor into parameter '0.inner.query.weight'.*before the opti"),
        (weight_only, "puts another tensor into parameter '0.inner.query.bias'"),
        (over_other_names, r"takes away parameter '0.inner.query.weight'.*__init__"),
        (no_buffer, "takes away buffer '0.inner.scale'"),
        (own_buffer, "makes buffer '0.inner.positions'"),
        (keeps_tensor, "makes sub-module '0.inner' in the forward, which keeps in attribute \"table\""),
    ],
)
def test_what_the_model_did_not_hold_is_refused(take_over: Callable[[Any, Any], None], text: str) -> None:
    model = made(take_over)
    before = described(model)
    with pytest.raises(CaptureError, match=text):
        captured(model)
    assert described(model) == before


class Calls(nn.Module):
    """Runs a function on itself, which may change sub-modules."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = forward
        self.head: nn.Module = nn.Linear(3, 3)
        self.steps: nn.Module = nn.ModuleList([nn.Tanh()])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def makes_parameter(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "extra"):
        self.extra = nn.Parameter(torch.ones(3))  # here
    return self.head(x) * self.extra  # type: ignore[no-any-return]


def adds_layer(self: Any, x: Tensor) -> Tensor:
    if len(self.steps) == 1:
        self.steps.append(nn.Linear(3, 3))
    return self.steps[1](self.head(x))  # type: ignore[no-any-return]


def grows(self: Any, x: Tensor) -> Tensor:
    self.steps.append(nn.Tanh())
    for step in self.steps:
        x = step(x)
    return self.head(x)  # type: ignore[no-any-return]


def grows_unused(self: Any, x: Tensor) -> Tensor:
    self.steps.append(nn.Tanh())
    return self.head(x)  # type: ignore[no-any-return]


def differs_afterwards(self: Any, x: Tensor) -> Tensor:
    if isinstance(self.steps, nn.ModuleList):
        self.steps = nn.Tanh()  # here
        return self.head(x)  # type: ignore[no-any-return]
    return self.steps(self.head(x))  # type: ignore[no-any-return]


def counts_too(self: Any, x: Tensor) -> Tensor:
    self.steps = nn.Tanh()
    self.calls += 1
    return self.steps(self.head(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (makes_parameter, r"the model \(.*test_first_calls.py:\d+\) makes parameter 'extra' in the forward"),
        (adds_layer, "makes parameter 'steps.1.weight' in the forward"),
        (grows, "puts a sub-module in the place of another one, and the call after that does something else"),
        (grows_unused, "the call after that does something else"),
        (differs_afterwards, r"the model \(.*test_first_calls.py:\d+\) puts a sub-module in the place of another one"),
        (counts_too, 'counts from call to call.*"calls" of the model'),
    ],
)
def test_what_later_calls_would_not_do_is_refused(forward: Callable[[Any, Tensor], Tensor], text: str) -> None:
    model = Calls(forward)
    before = described(model)
    with pytest.raises(CaptureError, match=text):
        captured(model)
    assert described(model) == before


def puts_anew(self: Any, x: Tensor) -> Tensor:
    self.steps = nn.Tanh()
    return self.steps(self.head(x))  # type: ignore[no-any-return]


def wraps_and_unwraps(self: Any, x: Tensor) -> Tensor:
    head, self.head = self.head, nn.Sequential(self.head, nn.Tanh())
    y = self.head(x)
    self.head = head
    return y  # type: ignore[no-any-return]


@pytest.mark.parametrize(("forward", "kind"), [(puts_anew, nn.Tanh), (wraps_and_unwraps, nn.ModuleList)])
def test_what_every_call_does_is_captured(forward: Callable[[Any, Tensor], Tensor], kind: type[nn.Module]) -> None:
    model = Calls(forward)
    assert captured(model).params == ["head.weight", "head.bias"]
    assert isinstance(model.steps, kind)


def test_scripted_modules_stay() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh())), nn.Linear(3, 2))
    inner = model[0]
    assert len(captured(model).params) == 4
    assert model[0] is inner


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_big_bird_goes_over_to_full_attention(dropout: float) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = BigBirdConfig(
        vocab_size=11, **sizes, block_size=2, num_random_blocks=1, max_position_embeddings=64,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model, tokens = BigBirdModel(config), torch.randint(0, 11, (4, 5))
    plain = copy.deepcopy(model)
    plain(tokens)
    capture(model, (tokens,), {}, device=torch.device("cpu"), rows=4)
    assert described(model) == described(plain)


def graph(*ops: dict[str, Any], made: int, output: int) -> dict[str, Any]:
    given = [{"def": {"param": 0}}, {"def": {"input": 0}}]
    values = [*given, *({"def": {"op": {"op": op, "result": 0}}} for op in range(made))]
    listed = [{"results": [2 + number], **op} for number, op in enumerate(ops)]
    return {"values": values, "ops": listed, "outputs": [output], "buffers": [], "constants": []}


def test_draws_that_nothing_uses_make_no_difference() -> None:
    drawn = {"target": "aten.rand.default", "args": [], "random": True}
    filled = {"target": "aten.masked_fill.Scalar", "args": [{"value": 1}], "kwargs": {"value": {"int": 3}}}
    added = {"target": "aten.add.Tensor", "args": [{"value": 0}, {"value": 2}]}
    plain = graph(filled, added, made=2, output=3)
    beside = graph(drawn, filled, {**added, "args": [{"value": 0}, {"value": 3}]}, made=3, output=4)
    used = graph(drawn, filled, added, made=3, output=4)
    assert compute_the_same(plain, beside)
    assert not compute_the_same(plain, used)
    assert not compute_the_same(plain, graph({**filled, "kwargs": {"value": {"int": 4}}}, added, made=2, output=3))
