"""A backward in two parts gives what a whole one gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

import pyrannc
from pyrannc.blocks.split_backward import SplitBackward
from tests.ranks import RankPool

from .equivalence import Case, check

WIDTH = 6


class Twice(nn.Module):
    """One weight in two places, another beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.shared(self.own(self.shared(x)).tanh())
        return made


class Composed(nn.Module):
    """Weights that other weights are made of, and a root that no input leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.left @ self.right
        return torch.nn.functional.layer_norm(x @ weight, (WIDTH,)), self.table(torch.tensor([1, 3])) * 2


class Groups(nn.Module):
    """A norm of groups whose input has its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        image = self.layer(x.view(-1, 1, 2, WIDTH // 2)).contiguous(memory_format=torch.channels_last)
        made: Tensor = self.norm(image)
        return made


class Doubling(Function):
    """What may not be run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert not hasattr(ctx, "ran"), "once"
        ctx.ran = True
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Written(nn.Module):
    """A node of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Doubling.apply(self.layer(x), self.scale)  # type: ignore[no-untyped-call]  # torch has no types
        return made


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
    "twice": Twice,
    "composed": Composed,
    "written": Written,
    "groups": Groups,
    "convolution": lambda: nn.Sequential(nn.Unflatten(-1, (1, WIDTH)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3)),
}
EARLY = {
    "twice": {"shared.weight", "shared.bias"},
    "written": {"scale"},
    "groups": {"norm.weight", "norm.bias"},
}
"""What has its gradient before the second part."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wanted", [True, False])
def test_both_parts_give_what_the_whole_gives(name: str, wanted: bool) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    shape = (3, 4, WIDTH) if name == "attention" else (4, WIDTH)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=wanted)
    found = model(x)
    results = list(found) if isinstance(found, tuple) else [found]
    seeds = [torch.randn_like(result) for result in results]
    params = dict(model.named_parameters())
    torch.autograd.backward(results, seeds, retain_graph=True)
    expected = {key: param.grad for key, param in params.items()}
    expected_input, x.grad = x.grad, None
    if name == "written":
        results = [model(x)]
    for param in params.values():
        param.grad = None
    split = SplitBackward([get_gradient_edge(result) for result in results], seeds, [x] if wanted else [])
    split.run_inputs()
    early = {key for key, param in params.items() if param.grad is not None}
    assert early == (EARLY.get(name, set()) if wanted else set())
    if wanted:
        assert x.grad is not None
        assert expected_input is not None
        assert torch.equal(x.grad, expected_input)
    split.run_weights(keep_graph=False)
    for key, param in params.items():
        assert param.grad is not None, key
        torch.testing.assert_close(param.grad, expected[key], rtol=1e-14, atol=1e-14)


def test_the_graph_may_stay() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(2, WIDTH, requires_grad=True)
    made, seed = layer(x), torch.randn(2, WIDTH)
    for _ in range(2):
        split = SplitBackward([get_gradient_edge(made)], [seed], [x])
        split.run_inputs()
        split.run_weights(keep_graph=True)
    assert layer.weight.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(layer.weight.grad, 2 * seed.T @ x)
    torch.testing.assert_close(x.grad, 2 * seed @ layer.weight)


TWO = ["F0 F1 B0 F2 B1 B2", "F0 I0 F1 I1 W0 F2 I2 W1 W2"]
LATE = ["F0 F1 F2 I0 I1 W0 I2 W1 W2", "F0 F1 I0 F2 I1 I2 W0 W1 W2"]
FIRST = ["F0 F1 F2 I0 I1 I2 W0 W1 W2", "F0 F1 F2 I0 W0 I1 I2 W1 W2"]
CASES = [
    Case("chain", (4, 5), replicas=(1, 1), microbatches=3, schedule=TWO, optimizer="adamw"),
    Case("loss_inside", (4, 5), replicas=(1, 1), microbatches=3, schedule=LATE, input_grads=True),
    Case("tied", (4, 5), replicas=(1, 1), microbatches=3, schedule=FIRST),
    Case("hooked", (4, 5), replicas=(1, 1), microbatches=3, schedule=FIRST),
    Case("bert", (3, 3), replicas=(1, 1), microbatches=3, schedule=FIRST),
    Case("parametrized", (5, 4), replicas=(1, 1), microbatches=3, schedule=LATE),
    Case("gpt2_labels", (3, 2, 2), replicas=(2, 1), microbatches=3, schedule=LATE, sharding="optimizer"),
    Case("fork_join", (1, 0, 2), replicas=(1, 2), microbatches=3, schedule=FIRST, input_grads=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = ranks(len(case.rows)).run(check, case, str(tmp_path))
    assert found == [[] for _ in case.rows]


COMPILED = [
    Case("chain", (4, 5), replicas=(1, 1), microbatches=3, schedule=TWO, optimizer="adamw"),
    Case("loss_inside", (4, 5), replicas=(1, 1), microbatches=3, schedule=LATE, input_grads=True),
    Case("bert", (3, 3), replicas=(1, 1), microbatches=3, schedule=FIRST),
]


def _check_compiled(case: Case, folder: str) -> tuple[list[str], int]:
    """What differs from one process, and how many second parts of backwards of compiled Spans have been computed."""
    ran = 0

    def counted(self: SplitBackward, *, keep_graph: bool) -> None:
        nonlocal ran
        ran += sum(later.compute is not None for _, later in self._later)
        run(self, keep_graph=keep_graph)

    run = SplitBackward.run_weights
    with patch.object(SplitBackward, "run_weights", counted):
        return check(case, folder), ran


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_spans_equal_one_process(case: Case, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    env = {"RANNC_COMPILE_SPANS": "on"}
    found = ranks(2).run(_check_compiled, case, str(tmp_path), env=env, timeout_s=600)
    assert [differences for differences, _ in found] == [[], []]
    first, last = (ran for _, ran in found)
    assert last > 0
    assert (first > 0) == case.input_grads


def _planned() -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(8)]
    model = nn.Sequential(*layers)
    module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    module(torch.randn(64, 256)).sum().backward()
    schedule = module.plan["schedule"]
    module.undeploy()
    return schedule


@pytest.mark.parametrize("wanted", [True, False])
def test_the_planner_uses_it_where_it_is_wanted(wanted: bool, ranks: Callable[[int], RankPool]) -> None:
    forced = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "4", "RANNC_PROFILE": "never"}
    found = ranks(2).run(_planned, env={**forced, "RANNC_SPLIT_BACKWARD": str(wanted).lower()})
    parted = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3"]
    assert found == [parted if wanted else "fill_drain"] * 2
