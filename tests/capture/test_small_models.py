"""Captured small models equal the models, at a batch size that was not captured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyrannc._native import Graph
from pyrannc.capture import CaptureOptions, capture
from pyrannc.core.tail import DividedFacts

WIDTH = 6


def call(rows: int) -> Any:
    return (torch.randn(rows, WIDTH, dtype=torch.double),), {}


def ops_of(captured: Any) -> list[dict[str, Any]]:
    return json.loads(captured.graph_json)["ops"]  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)


class Fork(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.a(x) * self.b(x) + x


class Tied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class Written(Block):
    """Writes what it computes over numbers that nobody reads again."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.copy_(self.b(x).tanh())
        return y


@dataclass
class Result:
    loss: Tensor
    parts: list[Tensor | None]
    name: str = "?"


class DataclassResult(Block):
    def forward(self, x: Tensor) -> Result:
        y = self.a(x)
        return Result(y.mean(), [self.b(y), None], "named")


class DictResult(Block):
    def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = False) -> dict[str, Any]:
        y = self.a(x) if flag else self.b(x)
        return {"y": y * scale, "nothing": None, "text": "a", "two": (y, 2)}


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        y = self.a(x)
        F.relu_(y)
        z = torch.zeros_like(y)
        z[:, 1:3] = y[:, 2:4]
        z.view(-1, 2, WIDTH // 2)[:, 0].add_(self.b(y)[:, :3])
        return z + x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3.0 * x * grad, None


class CustomFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Square.apply(self.a(x), 2.0))


class Hooked(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 5.0)
        return self.b(y)


class Detached(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.no_grad():
            target = self.b(y).softmax(-1)
        return (y.detach() * self.b(y) - target).square()


class Guarded(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.a(x)
        if mask.all():
            return x
        return self.b(x) if mask.sum().item() > 0 else x * 0


class Reassigned(Block):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        return self.a(x - self.mean)


class Constants(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(WIDTH, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x + self.table) * torch.tensor(2.5) + torch.tensor([1.0] * WIDTH)


class BatchArithmetic(Block):
    def forward(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        y = self.a(x).view(rows * 2, width // 2)
        y = y + torch.arange(rows * 2, device=x.device).unsqueeze(1)
        y = torch.cat([y, y.new_zeros(rows * 4 // 2, 3)], 0)
        return y[: rows * 2].reshape(rows, width).sum() / rows


class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.4, self.training)) + torch.rand_like(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
        )
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return self.norm(y.view(x.shape[0], 4, -1))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.3)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, ids: Tensor, *, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden, (state, _) = self.rnn(self.embed(ids))
        hidden, _ = self.attention(hidden, hidden, hidden)
        logits = hidden @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), state


class Checkpointed(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(lambda y: self.a(y).tanh().sin(), x, use_reentrant=self.reentrant))


class Autocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            y = self.b(y)
        return y + self.a(y)


class Vmapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return torch.vmap(lambda row: row * row.sum())(y) + x


class ChunkSplit(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.a(x).chunk(2, dim=-1)
        values, places = self.b(x).topk(2, dim=-1)
        return first * second, values, places, *x.unbind(1)[:2]


SIMPLE = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, 2)),
    "fork": Fork,
    "tied": Tied,
    "dataclass": DataclassResult,
    "in_place": InPlace,
    "written": Written,
    "custom_function": CustomFunction,
    "hook": Hooked,
    "detach": Detached,
    "reassigned_buffer": Reassigned,
    "constants": Constants,
    "batch_arithmetic": BatchArithmetic,
    "dropout": Dropout,
    "checkpoint": lambda: Checkpointed(False),
    "checkpoint_reentrant": lambda: Checkpointed(True),
    "autocast_block": Autocast,
    "vmap": Vmapped,
    "chunk": ChunkSplit,
}


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("rows", [(4, 3), (1, 5), (6, 1)], ids=str)
def test_equals_model(name: str, rows: tuple[int, int], assert_equals_model: Any) -> None:
    assert_equals_model(SIMPLE[name]().double(), call, rows)


def test_graph_module_runs_as_a_whole(assert_equals_model: Any) -> None:
    model = nn.Sequential(Fork(), BatchArithmetic()).double()
    captured = assert_equals_model(model, call)
    params, (args, _) = dict(model.named_parameters()), call(5)
    (loss,) = captured.gm(*[params[name] for name in captured.params], *captured.input_tensors(args, {}))
    torch.testing.assert_close(loss, model(*args))


@pytest.mark.parametrize("name", ["dropout", "in_place", "tied"])
def test_equals_model_in_evaluation(name: str, assert_equals_model: Any) -> None:
    assert_equals_model(SIMPLE[name]().double().eval(), call)


def test_input_gradients(assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        return (torch.randn(rows, WIDTH, dtype=torch.double, requires_grad=True),), {}

    assert_equals_model(Fork().double(), make)


def test_keyword_arguments_and_dict_results(assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        return call(rows)[0], {"flag": True, "scale": torch.randn(rows, 1, dtype=torch.double)}

    assert_equals_model(DictResult().double(), make)


def test_convolution_updates_running_statistics(assert_equals_model: Any) -> None:
    captured = assert_equals_model(
        Convolution().double(), lambda rows: ((torch.randn(rows, 2, 8, 8, dtype=torch.double),), {})
    )
    assert all(op["mutates"] for op in ops_of(captured) if "batch_norm" in op["target"])


def test_embedding_lstm_and_attention(assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        return (torch.randint(0, 11, (rows, 5)),), {"labels": torch.randint(0, 11, (rows, 5))}

    model = Embedded().double()
    assert_equals_model(model, make)
    assert_equals_model(model.eval(), make)


def test_in_place_ops_that_nobody_can_tell_become_functional(assert_equals_model: Any) -> None:
    class Residual(Block):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.a, self.b, self.a):
                y = layer(x)
                y += x
                x = F.relu_(y)
            return x

    captured = assert_equals_model(Residual().double(), call)
    assert not any(op.get("mutates") for op in ops_of(captured))


def test_in_place_ops_that_take_masks_and_indices_become_functional(assert_equals_model: Any) -> None:
    class Chosen(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            y.masked_fill_(x > 0, 0.5)
            y[x < -1] += self.b(x)[x < -1]
            y.scatter_(1, x.argmax(1, keepdim=True), 2.0)
            return y

    captured = assert_equals_model(Chosen().double(), call)
    assert not any(op.get("mutates") for op in ops_of(captured))


def test_in_place_ops_that_take_a_larger_type_stay(assert_equals_model: Any) -> None:
    class Rounds(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x).float()
            y += x
            return self.b(y.double())

    captured = assert_equals_model(Rounds().double(), call)
    assert [op["target"] for op in ops_of(captured) if op.get("mutates")] == ["aten.add_.Tensor"]


def test_in_place_ops_that_show_stay(assert_equals_model: Any) -> None:
    class Shows(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            row = y[:, 0]
            y.mul_(2.0)
            with torch.no_grad():
                z = self.b(x)
            z.add_(1.0)
            with torch.no_grad():
                y.add_(3.0)
            return y + row.unsqueeze(1) + z

    captured = assert_equals_model(Shows().double(), call)
    assert [op["target"] for op in ops_of(captured) if op.get("mutates")] == ["aten.mul_.Tensor", "aten.add_.Tensor"]


class StepsFirst(nn.Module):
    """Attention whose steps come before the rows, as PyTorch's does by default."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.attention = nn.MultiheadAttention(6, heads)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x).transpose(0, 1)
        steps = steps + self.attention(steps, steps, steps, need_weights=False)[0]
        return self.last(steps.transpose(0, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_whose_steps_come_first_keeps_rows_apart(heads: int, assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        return (torch.randn(rows, 5, 6, dtype=torch.float64),), {}

    captured = assert_equals_model(StepsFirst(heads).double(), make)
    divided = Graph.from_json(captured.graph_json).divide_tail("batch")
    assert not DividedFacts.from_json(divided.to_json()).tail.ops


class Prompted(Block):
    """Puts prompts before each row, of which it takes the first of those that are expanded to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.Embedding(4, WIDTH)
        self.numbers = torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.numbers.unsqueeze(0).expand(len(x), -1).to(self.prompts.weight.device)
        prompts = self.prompts(rows[:1]).repeat(len(x), 1, 1)
        return self.b(self.a(torch.cat((prompts, x[:, None]), 1)).tanh())  # type: ignore[no-any-return]


def test_the_first_of_expanded_rows_is_no_row_of_the_batch(assert_equals_model: Any) -> None:
    captured = assert_equals_model(Prompted().double(), call)
    divided = Graph.from_json(captured.graph_json).divide_tail("batch")
    assert not DividedFacts.from_json(divided.to_json()).tail.ops


class OtherWhereTraced(nn.Module):
    """Leaves a mask that it makes out where it is full, but not where it is traced, and then it does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def left_out(self, mask: Tensor) -> bool:
        traced = torch.compiler.is_compiling() or isinstance(mask, torch._subclasses.FakeTensor)
        return not traced and bool(mask.all())

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        y, full = self.linear(x), torch.ones(x.shape[0], WIDTH + 1, dtype=torch.bool)
        y = y if self.left_out(full) else y * full
        return y if self.left_out(shown) else y * shown


def test_a_model_that_fails_where_it_knows_of_the_trace_is_not_told(assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        return (torch.randn(rows, WIDTH, dtype=torch.float64), torch.ones(rows, WIDTH, dtype=torch.bool)), {}

    captured = assert_equals_model(OtherWhereTraced().double(), make)
    assert not captured.kept_whole
    # What data go into is masked all the same: the next batch may have others.
    assert [op["target"] for op in ops_of(captured)].count("aten.mul.Tensor") == 1


def test_guard_is_answered_from_the_sample(assert_equals_model: Any) -> None:
    def make(rows: int) -> Any:
        mask = torch.ones(rows, dtype=torch.bool)
        mask[0] = False
        return (*call(rows)[0], mask), {}

    captured = assert_equals_model(Guarded().double(), make)
    assert len(captured.assumptions) == 2
    assert all(assumption.where.file == __file__ for assumption in captured.assumptions)
    assert not any(assumption.assumed for assumption in captured.assumptions)


def test_random_guard_with_one_answer(assert_equals_model: Any) -> None:
    class NeverDropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            if torch.rand([]) >= 0.0:
                x = self.a(x)
            return F.dropout(x, 0.5)

    assert_equals_model(NeverDropped().double(), call)


def test_leaf_module_is_one_op(assert_equals_model: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fork(), nn.Linear(WIDTH, 2)).double()
    captured = assert_equals_model(model, call, options=CaptureOptions(("1",)))
    assert [op["target"] for op in ops_of(captured)] == [
        "aten.linear.default", "pyrannc.opaque.module.1", "aten.linear.default",
    ]  # fmt: skip
    assert ops_of(captured)[1]["opaque"]


def test_leaf_module_that_cannot_run_without_data(assert_equals_model: Any) -> None:
    class ThroughNumpy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * float(x.detach().numpy().shape[1])

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ThroughNumpy(), nn.Linear(WIDTH, 2)).double()
    assert_equals_model(model, call, options=CaptureOptions(("1",)))


def test_a_view_of_an_input_that_is_copied_first_is_one_of_the_copy() -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1, 4)

    found = capture(Flat(), (torch.randn(3, 2, 4),), {}, device=torch.device("cpu"), rows=3, apart=True)
    graph = json.loads(found.graph_json)
    copied, flat = (op["results"][0] for op in graph["ops"])
    assert graph["values"][flat]["alias_of"] == copied
    assert "alias_of" not in graph["values"][copied]


def test_a_copied_input_shares_no_memory_with_another_part_of_one_tensor() -> None:
    class Joined(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.cat([x.view(-1, 4), y.view(-1, 4)])

    parts = tuple(torch.randn(2, 3, 2, 4))
    found = capture(Joined(), parts, {}, device=torch.device("cpu"), rows=3, apart=True)
    graph = json.loads(found.graph_json)
    copied, *views, _ = (op["results"][0] for op in graph["ops"])
    inputs = graph["inputs"]
    assert [value.get("alias_of") for value in map(graph["values"].__getitem__, (*inputs, copied, *views))] == [
        None, None, None, copied, inputs[1],
    ]  # fmt: skip


class _Of(nn.Module):
    """What a function makes of a layer's result."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.double)
        self.made = made

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.made(self.layer(x), *more)


def captured_of(made: Any, *more: Tensor, rows: int = 3) -> Any:
    args, kwargs = call(rows)
    per_row = [1, *(0 for _ in more)]
    return capture(_Of(made), (*args, *more), kwargs, device=torch.device("cpu"), rows=rows, per_row=per_row)


def test_length_of_a_tensor_is_any_number_of_rows(assert_equals_model: Any) -> None:
    captured = captured_of(lambda y: y.sum(1) / len(y))
    assert not captured.kept_whole
    assert_equals_model(_Of(lambda y: y.sum(1) / len(y)), call, (3, 5))


@pytest.mark.parametrize(
    "draw",
    [
        lambda size: torch.randn(size, generator=None),
        lambda size: torch.rand(size, generator=None),
        lambda size: torch.randint(5, size, generator=None),
        lambda size: torch.randint(2, 5, size, generator=None),
    ],
)
def test_no_generator_is_none(draw: Any) -> None:
    captured = captured_of(lambda y: y + draw((y.shape[0], WIDTH)))
    assert not captured.kept_whole
    (drawing,) = [node for node in captured.op_nodes if "rand" in str(node.target)]
    assert "generator" not in str(drawing.target)


def test_error_inside_of_a_rule_for_fake_tensors_shows_its_operands() -> None:
    def resized(y: Tensor, sizes: Tensor) -> Tensor:
        height, width = sizes.tolist()
        image = y.view(y.shape[0], 1, 2, 3)
        return F.interpolate(image, size=(height, width), mode="bilinear", antialias=True)

    (kept,) = captured_of(resized, torch.tensor([4, 5])).kept_whole
    assert "Cannot cast tensor(..., size=(), dtype=torch.int64) to number" in kept.cause
