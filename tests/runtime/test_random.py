"""Random models under random Plans with random rows equal one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pyrannc
from pyrannc.job import process
from tests.ranks import RankPool

from .equivalence import Differences, double_precision, local_slice
from .models import WIDTH, mean_rows
from .plans import cut_plan, graph_of, possible_cuts

UNARY = ("linear", "tanh", "scale", "clone_in_place")
BINARY = ("add", "multiply", "concatenate")


@dataclass(frozen=True)
class Op:
    """One Op on earlier results; ``weight`` chooses a layer, which Ops may share."""

    kind: str
    left: int
    right: int
    weight: int


class RandomModel(nn.Module):
    """Ops on a growing list of results, which begins with the inputs."""

    def __init__(self, ops: tuple[Op, ...], loss_inside: bool) -> None:
        super().__init__()
        self.ops = ops
        self.loss_inside = loss_inside
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.joins = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        results = [x, y]
        for op in self.ops:
            results.append(self._apply(op, results))
        if self.loss_inside:
            return (results[-1] - y).square().mean()
        return {"last": torch.sin(results[-1]), "middle": results[len(results) // 2] * 1.5}

    def _apply(self, op: Op, results: list[Tensor]) -> Tensor:
        left, right = results[op.left % len(results)], results[op.right % len(results)]
        if op.kind == "linear":
            return self.layers[op.weight % len(self.layers)](left)  # type: ignore[no-any-return]
        if op.kind == "tanh":
            return torch.tanh(left)
        if op.kind == "scale":
            return left * self.layers[op.weight % len(self.layers)].bias
        if op.kind == "clone_in_place":
            return left.clone().mul_(0.5).add_(right)
        if op.kind == "add":
            return left + right
        if op.kind == "multiply":
            return torch.sigmoid(left) * right
        return self.joins[op.weight % len(self.joins)](torch.cat([left, right], 1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Trial:
    """A random model, Plan and batch; cuts are chosen among the possible ones by these fractions."""

    ops: tuple[Op, ...]
    loss_inside: bool
    cuts: tuple[float, ...]
    ranks: tuple[tuple[int, ...], ...]
    microbatches: int
    rows: tuple[int, ...]
    gather_inputs: bool
    input_grads: bool

    @property
    def total_rows(self) -> int:
        return sum(self.rows) if self.gather_inputs else self.rows[0]


@st.composite
def trials(draw: st.DrawFn, stages: int) -> Trial:
    world_size = draw(st.integers(stages, 4))
    order = draw(st.permutations(range(world_size)))
    ends = sorted(draw(st.permutations(range(1, world_size)))[: stages - 1])
    ranks = tuple(tuple(order[lo:hi]) for lo, hi in zip([0, *ends], [*ends, world_size], strict=True))
    small = st.integers(0, 20)
    op = st.builds(Op, st.sampled_from(UNARY + BINARY), small, small, small)
    rows = draw(st.lists(st.integers(0, 6), min_size=world_size, max_size=world_size))
    rows[0] += not rows[0]
    return Trial(
        ops=tuple(draw(st.lists(op, min_size=2 * stages, max_size=14))),
        loss_inside=draw(st.booleans()),
        cuts=tuple(draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=len(ends), max_size=len(ends)))),
        ranks=ranks,
        microbatches=draw(st.integers(1, 5)),
        rows=tuple(rows),
        gather_inputs=draw(st.booleans()),
        input_grads=draw(st.booleans()),
    )


def loss_of(output: Any, trial: Trial) -> Tensor:
    if trial.loss_inside:
        return output  # type: ignore[no-any-return]
    return mean_rows(output["last"].square().sum(1)) + mean_rows(output["middle"].sum(1))


def run(trial: Trial, folder: str) -> tuple[int, list[str]]:
    """Number of Stages, none if the model has too few possible cuts, and what differs."""
    with double_precision():
        torch.manual_seed(1)
        model, plain = (RandomModel(trial.ops, trial.loss_inside) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        file = Path(folder) / "plan.json"
        if process.get_rank() == 0:
            write_plan(model, trial, file)
        pyrannc.barrier()
        if not file.exists():
            return 0, []
        module = pyrannc.RaNNCModule(
            model, gather_inputs=trial.gather_inputs, batch_arguments=["x", "y"], load_deployment=file
        )
        differences = Differences()
        for step in range(2):
            train(module, plain, trial, differences, step)
        for name, param in plain.named_parameters():
            differences.compare(f"gradient of {name}", module.get_param_grad(name), param.grad)
        module.undeploy()
        return len(trial.ranks), differences.found


def write_plan(model: nn.Module, trial: Trial, file: Path) -> None:
    file.unlink(missing_ok=True)
    sample = [torch.randn(3, WIDTH, requires_grad=trial.input_grads) for _ in range(2)]
    graph = graph_of(model, tuple(sample), {}, 3)
    possible = possible_cuts(graph)
    if len(possible) >= len(trial.cuts):
        chosen = sorted(possible.pop(int(fraction * len(possible))) for fraction in trial.cuts)
        cut_plan(graph, chosen, trial.ranks, trial.microbatches).write(file)


def train(module: nn.Module, plain: nn.Module, trial: Trial, differences: Differences, step: int) -> None:
    """One call and backward of both; gradients add up over steps."""
    torch.manual_seed(step)
    whole = [torch.randn(trial.total_rows, WIDTH, requires_grad=trial.input_grads) for _ in range(2)]
    rows = local_slice(trial.rows) if trial.gather_inputs else slice(None)
    local = [x.detach()[rows].clone().requires_grad_(trial.input_grads) for x in whole]
    if not trial.gather_inputs and process.get_rank() != 0:
        local = [x.detach().zero_().requires_grad_(trial.input_grads) for x in local]
    expected, output = plain(*whole), module(*local)
    own = expected if trial.loss_inside else {name: item[rows] for name, item in expected.items()}
    differences.compare(f"outputs of step {step}", output, own)
    if not trial.loss_inside and not output["last"].requires_grad:
        return
    if trial.loss_inside and not output.requires_grad:
        return
    loss_of(output, trial).backward()
    loss_of(expected, trial).backward()
    for index, (mine, right) in enumerate(zip(local, whole, strict=True)):
        if trial.input_grads:
            wanted = torch.zeros_like(right) if right.grad is None else right.grad
            if not trial.gather_inputs and process.get_rank() != 0:
                wanted = torch.zeros_like(wanted)
            found = torch.zeros_like(mine) if mine.grad is None else mine.grad
            differences.compare(f"gradient of input {index}, step {step}", found, wanted[rows])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_models_and_plans(
    stages: int, data: st.DataObject, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    trial = data.draw(trials(stages))
    world_size = sum(map(len, trial.ranks))
    outcomes = ranks(world_size).run(run, trial, str(tmp_path))
    event(f"{outcomes[0][0]} stages")
    assert [found for _, found in outcomes] == [[] for _ in range(world_size)]
