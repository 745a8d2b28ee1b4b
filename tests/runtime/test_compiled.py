"""Compiled Spans: the numbers of Spans that are not, and those that cannot be compiled run as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

import pyrannc
from pyrannc.blocks import beside_eager, compiler
from pyrannc.blocks.beside_eager import difference
from pyrannc.blocks.compiled import SpanCode
from pyrannc.blocks.compiler import BY_PLAN, Compiler, own_folder
from pyrannc.blocks.form import Meta
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.graphs import named, results_in
from pyrannc.blocks.joint import _drawing, _parted
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.split_backward import SplitBackward
from pyrannc.capture.torch_internals.compiler import (
    memory_budget,
    mode_of_known_sizes,
    operators_below_autograd,
    without_changes,
)
from pyrannc.core.graph import GraphFacts
from tests.ranks import RankPool
from tests.test_spans import CPU, ROWS, captured_part

from .equivalence import double_precision, environment
from .plans import sealed

Ranks = Callable[[int], RankPool]
WIDTH, TOKENS, WORDS, STEPS = 8, 4, 12, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).transpose(1, 2) + bias
        return functional.dropout(scores.softmax(-1), 0.1) @ self.value(memory)


class BertLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.last = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.norm(x + functional.dropout(self.attention(x, x, bias), 0.1))
        return self.last(x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1))


class Bert(nn.Module):
    """Layers with dropout, a mask of padding, and the loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(BertLayer() for _ in range(3))

    def forward(self, words: Tensor, targets: Tensor) -> dict[str, Tensor]:
        bias = torch.zeros(words.shape, dtype=torch.float64).masked_fill(words == 0, -1e9)[:, None]
        x = functional.dropout(self.embedding(words), 0.1)
        for layer in self.layers:
            x = layer(x, bias)
        logits = x @ self.embedding.weight.t()
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class T5Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cross, self.scale = Attention(), Attention(), nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        x = x + self.attention(normed, normed, bias) + self.cross(normed, memory, torch.zeros_like(bias))
        return x + functional.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)), 0.1)


class T5(nn.Module):
    """Positions that all layers share, a memory that all look at, and a criterion outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * TOKENS, 1)
        self.layers, self.head = nn.ModuleList(T5Layer() for _ in range(3)), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1])
        bias = self.positions(places[:, None] - places[None] + TOKENS).squeeze(-1)
        x = memory = self.embedding(words)
        for layer in self.layers:
            x = layer(x, memory, bias)
        return self.head(x)


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(self.second(self.relu(self.norm(self.first(x)))))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """Convolutions with statistics of the rows in hand, and work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*[ResidualBlock() for _ in range(3)]), nn.Linear(2, 3)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.blocks(x).mean((2, 3))), targets)


class Heads(nn.Module):
    """Two results, of which the script uses one; zeros as gradients of the other would become none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x, (x * 0).sqrt()


def words(generator: Generator) -> Tensor:
    return torch.randint(0, WORDS, (4, TOKENS), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Generator], tuple[Tensor, ...]]]] = {
    "bert": (Bert, lambda g: (words(g), words(g))),
    "t5": (T5, lambda g: (words(g),)),
    "resnet": (ResNet, lambda g: (torch.randn(4, 2, 4, 4, generator=g), torch.randint(0, 3, (4,), generator=g))),
    "heads": (Heads, lambda g: (torch.randn(4, WIDTH, generator=g),)),
}


def loss_of(found: Any) -> Tensor:
    if isinstance(found, dict):
        return found["loss"]
    found = found[0] if isinstance(found, tuple) else found
    return found if found.dim() == 0 else found.square().mean()


def trained(name: str, folder: str, items: dict[str, str]) -> tuple[list[Tensor], str, Any]:
    """Losses, gradients, parameters and buffers of some steps, and what the report says of compiling."""
    make, data = MODELS[name]
    options = {"row_mixing": "microbatch"} if name == "resnet" else {}
    with environment({"RANNC_PROFILE_CACHE_DIR": folder, **items}), double_precision():
        torch.manual_seed(1)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        module = pyrannc.RaNNCModule(model, optimizer, **options)
        noted = []
        for step in range(STEPS):
            loss = loss_of(module(*data(Generator().manual_seed(2 * step + pyrannc.get_rank()))))
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            noted.append(loss.detach().clone())
            noted += [module.get_param_grad(name) for name, _ in module.named_parameters(from_global=True)]
            optimizer.step()
            optimizer.zero_grad()
        report = module.report()
        state = module.state_dict(rank0_only=False)
        module.undeploy()
        return [*noted, *state.values()], report.compiled, report.to_dict()["compiled"]


def compared(name: str, folder: str, items: dict[str, str]) -> str:
    """Trains both ways, and with what was kept, without a trace of any Span; what the report says."""
    plain, nothing, _ = trained(name, folder, {"RANNC_COMPILE_SPANS": "off"})
    assert nothing == ""
    ours, told, in_json = trained(name, folder, {"RANNC_COMPILE_SPANS": "on", **items})
    assert told == in_json
    with patch.object(compiler, "trace", side_effect=AssertionError("it is traced again")):
        again, of_kept, _ = trained(name, folder, {"RANNC_COMPILE_SPANS": "on", **items})
    assert of_kept == told
    for mine, kept, right in zip(ours, again, plain, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(kept, right, rtol=1e-10, atol=1e-12)
    return told


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where all tests keep compiled code, as starts of a script would."""
    return str(tmp_path_factory.mktemp("cache"))


CASES = [
    ("bert", {}),
    ("bert", {"RANNC_ENABLE_ZERO": "3"}),
    ("t5", {}),
    ("resnet", {}),
    ("heads", {}),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "items"), CASES, ids=lambda item: item if isinstance(item, str) else "-".join(item))
def test_equals_spans_that_are_not_compiled(name: str, items: dict[str, str], ranks: Ranks, folder: str) -> None:
    told, other = ranks(2).run(compared, name, folder, items, timeout_s=600)
    assert told == other
    done, _, all_ = told.split()[:3]
    assert done == all_, told
    assert int(all_) >= 6
    kept = Path(folder) / "compiled"
    assert any(kept.iterdir())
    assert kept.stat().st_mode & 0o777 == 0o700


@dataclass
class Stage:
    """Code with its parameters, by Value."""

    code: StageCode
    params: dict[int, Tensor]
    facts: GraphFacts

    def __call__(self, x: Tensor) -> list[Tensor]:
        results = self.code(ROWS, {**self.params, self.facts.inputs[0]: x})
        return [results[value] for value in self.facts.outputs]


class Drawing(nn.Module):
    """Draws from torch's generator, as often as is said, each time for what was drawn before unless ``apart``."""

    def __init__(self, draws: int, *, apart: bool = False) -> None:
        super().__init__()
        self.first, self.draws, self.apart = nn.Linear(WIDTH, WIDTH), draws, apart

    def forward(self, x: Tensor) -> Tensor:
        x = start = self.first(x)
        for _ in range(self.draws):
            x = x + torch.poisson((start if self.apart else x).detach().abs())
        return x.tanh()


def compiled(
    model: nn.Module,
    x: Tensor,
    folder: str,
    *,
    in_parts: bool = False,
    conditions: str = "",
    memory_budget_percent: int | None = None,
) -> tuple[Stage, list[str | None]]:
    captured, facts, part = captured_part(model, x)
    code = StageCode(captured, facts, part, CPU, Randomness(CPU))
    params: dict[int, Tensor] = {param.value: model.get_parameter(param.names[0]) for param in facts.params}
    known = {value: Meta.of(tensor) for value, tensor in {**params, facts.inputs[0]: x}.items()}
    own = Compiler(CPU, Path(folder), lambda: conditions, memory_budget_percent=memory_budget_percent)
    late = params.keys() if in_parts else frozenset()
    tasks = own.tasks(code, facts, ROWS, known, None, trains=True, late=late)
    return Stage(code, params, facts), [own.compile(task, code) for task in tasks]


class Wide(nn.Module):
    """Keeps most for what is cheap to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(nn.functional.gelu(self.first(x)))


def kept_bytes(stage: Callable[[Tensor], list[Tensor]], x: Tensor) -> tuple[int, list[Tensor]]:
    """What autograd keeps of a forward, beside its gradients and results."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = stage(x)
    return sum(kept.values()), results


@pytest.mark.timeout(300)
def test_a_memory_budget_has_spans_keep_less(folder: str) -> None:
    model, x = Wide(), torch.randn(ROWS, WIDTH, requires_grad=True)
    inputs = [x, *model.parameters()]
    right = torch.autograd.grad(model(x).square().sum(), inputs)
    found = []
    # Code of another budget, in the same folder, is not taken for it.
    for budget in (None, 80, None):
        stage, refusals = compiled(model, x, folder, memory_budget_percent=budget)
        assert set(refusals) == {None}
        kept, (result,) = kept_bytes(stage, x)
        found.append(kept)
        for mine, grad in zip(torch.autograd.grad(result.square().sum(), inputs), right, strict=True):
            torch.testing.assert_close(mine, grad)
    # What gelu makes.
    assert found[0] - found[1] == ROWS * 16 * WIDTH * x.element_size()
    assert found[0] == found[2]


class Rare(nn.Module):
    """Draws hardly ever anything but zeros, so that a comparison of results may well see no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return made * (1 + torch.poisson(torch.full_like(made.detach(), 5e-3)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", [None, 80, 30, 0])
def test_what_is_drawn_is_not_drawn_again_for_a_backward(folder: str, budget: int | None) -> None:
    model, x = Rare(), torch.randn(ROWS, WIDTH, requires_grad=True)
    stage, refusals = compiled(model, x, folder, memory_budget_percent=budget)
    assert set(refusals) == {None}
    drawn = 0
    for seed in range(100):
        stage.code.randomness.begin(seed)
        (result,) = stage(x)
        factors = (result / model.first(x)).detach().round()
        drawn += int((factors != 1).sum())
        (grad,) = torch.autograd.grad(result.sum(), [model.first.bias])
        torch.testing.assert_close(grad, factors.sum(0))
    assert drawn >= 5


def attention(q: Tensor, k: Tensor, v: Tensor, tangent: Tensor) -> list[Tensor]:
    aten, given = torch.ops.aten, (q, k, v)
    made, sums, *shapes, seed, offset, _ = aten._scaled_dot_product_flash_attention(*given, 0.1)
    backward = aten._scaled_dot_product_flash_attention_backward
    return [made, *backward(tangent, *given, made, sums, *shapes, 0.1, False, seed, offset)]


@pytest.mark.parametrize("budget", [None, 80, 30, 0])
def test_what_attention_with_dropout_makes_is_kept_result_by_result(budget: int | None) -> None:
    mode = mode_of_known_sizes()
    with mode, torch.no_grad():
        arguments = [torch.empty(2, 4, 64, 16, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        graph = without_changes(operators_below_autograd(attention, arguments, mode), arguments, mode)
    names = [*(f"primals_{place}" for place in range(3)), "tangents_0"]
    with memory_budget(budget):
        forward, backward = _parted(named(graph, names), 1, mode)
    assert all(isinstance(node.meta["val"], Tensor) for node in results_in(forward))
    assert not _drawing(backward)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("budget", [80, 30, 0])
def test_spans_that_draw_are_compiled_under_memory_budgets(folder: str, budget: int) -> None:
    _, refusals = compiled(
        Drawing(3), torch.randn(ROWS, WIDTH, requires_grad=True), folder, memory_budget_percent=budget
    )
    assert set(refusals) == {None}


@pytest.mark.timeout(300)
def test_what_differs_is_not_used(folder: str) -> None:
    stage, refusals = compiled(Drawing(1), torch.randn(ROWS, WIDTH), folder)
    code = stage.code
    assert set(refusals) == {None}
    found = next(made for span in code.spans for made in span.function.codes.values() if isinstance(made, SpanCode))
    assert difference(found, CPU) is None
    right = found.forward

    def wrong(tensors: list[Tensor]) -> list[Tensor]:
        first, *others = right(tensors)
        return [first * (1 + 1e-4), *others]

    assert "result 0 is off by" in (difference(replace(found, forward=wrong), CPU) or "")
    assert found.backward is not None
    backward = found.backward

    def wrong_gradients(tensors: list[Tensor]) -> list[Tensor]:
        return [grad + 1e-3 for grad in backward.first(tensors)]

    assert "the gradient of argument" in (
        difference(replace(found, backward=replace(backward, first=wrong_gradients)), CPU) or ""
    )


@pytest.mark.timeout(300)
def test_what_was_computed_in_float64_is_let_go_where_memory_ends(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = compiled(Tied(), torch.randn(ROWS, WIDTH), folder)
    codes = [made for span in stage.code.spans for made in span.function.codes.values() if isinstance(made, SpanCode)]
    run_node, outcome = beside_eager._Exact.run_node, beside_eager._outcome
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def run_short_of_memory(self: Any, node: Any) -> Any:
        found = run_node(self, node)
        if isinstance(found, Tensor) and node.op == "call_function":
            made.append(weakref.ref(found))
        if len(made) == 4:
            raise torch.OutOfMemoryError("no more")
        return found

    def watched(*args: Any, **kwargs: Any) -> Any:
        alive.append(sum(tensor() is not None for tensor in made))
        return outcome(*args, **kwargs)

    monkeypatch.setattr(beside_eager._Exact, "run_node", run_short_of_memory)
    monkeypatch.setattr(beside_eager, "_outcome", watched)
    assert difference(codes[0], CPU) is None
    assert len(made) == 4
    assert alive == [0, 0, 0]


@pytest.mark.timeout(300)
def test_second_parts_that_differ_are_not_used(folder: str) -> None:
    stage, _ = compiled(Tied(), torch.randn(ROWS, WIDTH, requires_grad=True), folder, in_parts=True)
    codes = [made for span in stage.code.spans for made in span.function.codes.values() if isinstance(made, SpanCode)]
    found = next(code for code in codes if code.backward is not None and code.backward.second is not None)
    assert difference(found, CPU) is None
    assert found.backward is not None
    second = found.backward.second
    assert second is not None

    def wrong(tensors: list[Tensor]) -> list[Tensor]:
        return [grad + 1e-2 for grad in second(tensors)]

    assert "the gradient of argument" in (
        difference(replace(found, backward=replace(found.backward, second=wrong)), CPU) or ""
    )


@pytest.mark.timeout(300)
def test_kernels_that_draw_one_after_another_find_the_generator_set(folder: str) -> None:
    stage, refusals = compiled(Drawing(3), torch.randn(ROWS, WIDTH), folder)
    assert set(refusals) == {None}
    codes = [made for span in stage.code.spans for made in span.function.codes.values() if isinstance(made, SpanCode)]
    found = next(code for code in codes if code.lifted.placed)
    assert len(found.lifted.placed) == 3
    assert difference(found, CPU) is None
    exchanged = replace(found.lifted, placed=found.lifted.placed[::-1])
    assert "result 0" in (difference(replace(found, lifted=exchanged), CPU) or "")
    for placed in (found.lifted.placed[:2], [*found.lifted.placed, found.lifted.placed[0]]):
        with pytest.raises(RuntimeError, match="from the generator"):
            difference(replace(found, lifted=replace(found.lifted, placed=placed)), CPU)


@pytest.mark.timeout(300)
def test_kernels_that_may_draw_in_any_order_are_left_alone(folder: str) -> None:
    _, refusals = compiled(Drawing(2, apart=True), torch.randn(ROWS, WIDTH), folder)
    assert "Ops that do not wait for one another draw from the device's generator" in refusals


class Tied(nn.Module):
    """Layers that share a weight, and one of two results that a backward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norms = (
            nn.ModuleList(make(WIDTH) for _ in range(3)) for make in (self._linear, nn.LayerNorm)
        )
        self.layers[2].weight = self.layers[0].weight

    @staticmethod
    def _linear(width: int) -> nn.Linear:
        return nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + functional.gelu(layer(x)))
        return x, x.sin() @ self.layers[1].weight


@pytest.mark.timeout(300)
@pytest.mark.parametrize("both", [True, False])
def test_gradients_of_parameters_may_come_later(both: bool, folder: str) -> None:
    """A backward for one result only computes its gradients in another way."""
    with double_precision():
        torch.manual_seed(0)
        model, x = Tied(), torch.randn(ROWS, WIDTH, requires_grad=True)
        stage, refusals = compiled(model, x, folder, in_parts=True)
    assert set(refusals) == {None}
    results = model(x)[: 1 + both]
    seeds = [torch.randn_like(result) for result in results]
    expected = torch.autograd.grad(results, [x, *model.parameters()], seeds)
    ours = stage(x)[: 1 + both]
    for keep_graph in (True, False):
        split = SplitBackward([get_gradient_edge(result) for result in ours], seeds, [x])
        split.run_inputs()
        assert all(param.grad is None for param in model.parameters())
        split.run_weights(keep_graph=keep_graph)
        for leaf, right in zip((x, *model.parameters()), expected, strict=True):
            torch.testing.assert_close(leaf.grad, right, rtol=1e-12, atol=1e-12)
            leaf.grad = None


class First(Function):
    """Two results, of which the second gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return grads[0]


@pytest.mark.timeout(300)
def test_later_gradients_are_of_this_backward_alone(folder: str) -> None:
    model, x = Tied(), torch.randn(ROWS, WIDTH, requires_grad=True)
    stage, _ = compiled(model, x, folder, in_parts=True)
    first, second = First.apply(stage(x)[0])  # type: ignore[no-untyped-call]  # torch has no types for it
    first.sum().backward(retain_graph=True)
    assert all(param.grad is not None for param in model.layers.parameters())
    model.zero_grad()
    second.sum().backward()
    assert all(param.grad is None for param in model.parameters())


WITHOUT_COMPILER = """
import torch, pyrannc
model = pyrannc.RaNNCModule(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
print(model.report().compiled)
"""


def test_without_a_compiler_all_runs_as_it_is(tmp_path: Path) -> None:
    environ = {**os.environ, "CXX": str(tmp_path / "none"), "RANNC_COMPILE_SPANS": "on"}
    environ["RANNC_PROFILE_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 of ")
    assert "there is no C++ compiler" in done.stdout
    assert "there is no C++ compiler" in done.stderr


WITH_LOGITS = """
import torch, pyrannc
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 4)
    def forward(self, x):
        logits = self.head(x).tanh()
        return {"loss": logits.square().mean(), "logits": logits}
model = pyrannc.RaNNCModule(Model())
for _ in range(4):
    model(torch.ones(2, 4))["loss"].backward()
print(model.report().compiled)
"""


def test_an_output_that_the_loss_is_made_of_gets_no_gradient_from_outside(tmp_path: Path) -> None:
    environ = {**os.environ, "RANNC_COMPILE_SPANS": "on", "RANNC_PROFILE_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITH_LOGITS], capture_output=True, text=True, timeout=240, check=True, env=environ
    )
    assert "1 of 1 Spans" in done.stdout
    # Code for a gradient of the logits would have been compiled again, once steps show that there is none.
    assert done.stderr.count("compilation:") == 1


def test_a_folder_of_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        own_folder(tmp_path)
    monkeypatch.undo()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert own_folder(open_to_all).stat().st_mode & 0o777 == 0o700


MEASURED = """
import sys, time, torch, pyrannc
from pyrannc.blocks.compiled import SpanCode
run, kind, file = SpanCode.__call__, sys.argv[1], sys.argv[2]
def slowed(self, *args):
    time.sleep(0.005)
    return run(self, *args)
if kind == "slow":
    SpanCode.__call__ = slowed
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(model, optimizer, load_deployment=file if kind == "load" else None)
for _ in range(3):
    model(torch.ones(2, 8)).square().sum().backward()
model.save_deployment(file)
print(model.report().compiled, "|", *model.plan.get("eager_spans", ()))
"""


def test_what_compiling_was_measured_not_to_pay_for_stands_in_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    environ = {**os.environ, "RANNC_COMPILE_SPANS": "on", "RANNC_PROFILE": "always"}

    def start(kind: str, **more: str) -> tuple[str, list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, kind, str(file)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**environ, "RANNC_PROFILE_CACHE_DIR": str(tmp_path / kind), **more},
        )
        assert done.returncode == 0, done.stderr
        # What was measured is no reason to warn.
        assert ("not compiled are" in done.stderr) == (kind == "broken")
        told, hashes = done.stdout.split("|")
        return told.strip(), hashes.split()

    # What fails here may work at the next start.
    told, hashes = start("broken", CXX=str(tmp_path / "none"))
    assert "there is no C++ compiler" in told
    assert hashes == []
    told, hashes = start("slow")
    count = len(hashes)
    assert count > 0
    assert told == f"0 of {count} Spans run compiled; not compiled are {count} because {BY_PLAN}"
    # Another start has the code, and not what was measured.
    shutil.copytree(tmp_path / "slow" / "compiled", tmp_path / "load" / "compiled")
    assert start("load") == (told, hashes)
    # A file that names one of them, as another device's would.
    content = {**json.loads(file.read_text()), "eager_spans": hashes[:1]}
    file.write_text(sealed(content).to_json())
    # With vector instructions, as outside of tests.
    again, named = start("load", TORCHINDUCTOR_VEC_ISA_OK="")
    assert named == hashes[:1]
    assert again.startswith(f"{count - 1} of {count} Spans run compiled")
