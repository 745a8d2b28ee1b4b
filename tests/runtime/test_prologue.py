"""What depends on no part of a batch: once a step, with one backward, equal to one process however it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyrannc
from pyrannc.runtime.prologue import Prologue
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, environment, local_slice, make_batch, make_model
from .models import RECIPES, WIDTH

Ranks = Callable[[int], RankPool]
ROWS = (5, 4)
MICROBATCHES = 3


class Ops(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def wrapped(model: nn.Module, stages: int, microbatches: int = MICROBATCHES) -> pyrannc.RaNNCModule:
    plan = {"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}
    with environment({**plan, "RANNC_RECAPTURE_INTERVAL": "0"}):
        return pyrannc.RaNNCModule(model)


def counts_of_a_step(name: str) -> tuple[int, ...]:
    """How often a step makes a weight of its norm, and a linear layer's result."""
    with double_precision():
        recipe = RECIPES[name]
        module = wrapped(make_model(recipe), 1)
        for seed in range(2):
            args, _, target = make_batch(recipe, 7, seed)
            with Ops() as ops:
                recipe.criterion(module(*args), target).backward()
        module.undeploy()
        return tuple(ops.counts[op] for op in (torch.ops.aten.exp.default, torch.ops.aten.addmm.default))


class Noisy(nn.Module):
    """Weights that are dropped at random, alike for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            weight = F.dropout(layer.weight, 0.4) + torch.rand(WIDTH)
            x = torch.tanh(F.linear(x, weight, layer.bias))
        return F.mse_loss(x + self.shift, y)


def gradients_of_noisy(stages: int, microbatches: int) -> dict[str, Tensor]:
    with double_precision():
        torch.manual_seed(0)
        module = wrapped(Noisy(), stages, microbatches)
        args, _, _ = make_batch(RECIPES["penalized"], sum(ROWS), 0)
        own = local_slice(ROWS)
        torch.manual_seed(7)
        module(*(tensor[own] for tensor in args)).backward()
        names = [name for name, _ in module.model.named_parameters()]
        found = {name: module.get_param_grad(name).clone() for name in names}
        module.undeploy()
        return found


def check_habits(name: str, stages: int) -> list[str]:
    """Two backwards of a call, backwards after later calls, calls without gradients in between, and evaluation."""
    with double_precision():
        recipe = RECIPES[name]
        differences = Differences()
        plain, module = make_model(recipe), wrapped(make_model(recipe), stages)
        own = local_slice(ROWS)

        def losses(seed: int) -> list[Tensor]:
            args, _, target = make_batch(recipe, sum(ROWS), seed)
            mine = recipe.criterion(module(*(tensor[own] for tensor in args)), target[own])
            return [mine, recipe.criterion(plain(*args), target)]

        def compare(when: str) -> None:
            for param_name, param in plain.named_parameters():
                differences.compare(f"{param_name}, {when}", module.get_param_grad(param_name), param.grad)
            state = module.state_dict(rank0_only=False)
            differences.compare(f"state, {when}", dict(state), dict(plain.state_dict()))

        pairs = losses(0)
        for loss in pairs:
            loss.backward(retain_graph=True)
        compare("first backward")
        for loss in pairs:
            (3 * loss).backward()
        compare("second backward")
        first, second = losses(1), losses(2)
        with torch.no_grad():
            losses(3)
        for pair in (second, first):
            for loss in pair:
                loss.backward()
        compare("two calls")
        module.eval()
        plain.eval()
        for loss in losses(4):
            loss.backward()
        compare("evaluation")
        module.undeploy()
        return differences.found


def test_it_runs_once_a_step(ranks: Ranks) -> None:
    for name in ("parametrized", "penalized"):
        assert ranks(1).run(counts_of_a_step, name) == [(1, 5 * MICROBATCHES)]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["parametrized", "penalized", "unled"])
def test_gradients_equal_those_of_one_process(name: str, stages: int, ranks: Ranks) -> None:
    assert ranks(2).run(check_habits, name, stages) == [[], []]


def test_what_is_drawn_is_the_same_under_all_plans(ranks: Ranks) -> None:
    expected, _ = ranks(2).run(gradients_of_noisy, 1, 1)
    for found in (*ranks(2).run(gradients_of_noisy, 2, 3), *ranks(2).run(gradients_of_noisy, 1, 4)):
        assert all(torch.allclose(found[name], expected[name], rtol=1e-10, atol=1e-12) for name in expected)


def test_gradients_of_half_the_digits_are_summed_in_all() -> None:
    weight = torch.ones(4, dtype=torch.float64, requires_grad=True)
    prologue = Prologue({0: weight.to(torch.bfloat16)}, {}, trains=True)
    for _ in range(1000):
        prologue.tensors[0].sum().backward()
        prologue.collect()
    prologue.backward(keep_graph=False)
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([1000.0] * 4, rel=0.01)
