"""What draws from Python or NumPy inside of what stays whole: alike on all ranks where they compute alike."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyrannc
from pyrannc.capture.nodes.chance import other_states
from pyrannc.job import agree, process
from tests.ranks import RankPool

from .equivalence import double_precision, local_slice
from .plans import cut_plan, graph_of, possible_cuts

WIDTH, ROWS = 4, 7
Ranks = Callable[[int], RankPool]
Division = tuple[tuple[tuple[int, ...], ...], int, tuple[int, ...]]
"""Ranks of each Stage, microbatches, rows of each rank."""
DIVISIONS: list[Division] = [
    (((0, 1),), 1, (4, 3)),
    (((0, 1),), 3, (2, 5)),
    (((0,), (1,)), 2, (7, 0)),
    (((1,), (0,)), 1, (3, 4)),
]


class Model(nn.Module):
    """Layers round a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.part = part
        self.after = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        drawn = self.part(self.before(x))
        return {"drawn": drawn, "made": self.after(drawn)}


class Mixes(nn.Module):
    """Runs on all rows, on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.tensor([random.random(), *np.random.rand(2).tolist(), random.gauss(0, 1)], dtype=x.dtype)
        return (x - x.mean(0)) + drawn


class DropsLayer(nn.Module):
    """Leaves layers out, as Python's random numbers say or NumPy's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or self.draw() >= 0.5:
                x = x + layer(x)
        return x


def by_python() -> float:
    return random.random()


def by_numpy() -> float:
    return float(np.random.uniform(0, 1))


class ShowsDrop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + 1 if random.random() < 0.25 else x * 0


class Masks(nn.Module):
    """Leaves out a span of each row, as SpecAugment does."""

    def forward(self, x: Tensor) -> Tensor:
        mask = np.ones((len(x), WIDTH * 8), dtype=bool)
        for row in mask:
            starts = np.random.choice(WIDTH * 8 - 3, 4, replace=False)
            row[(starts[:, None] + np.arange(3)).reshape(-1)] = False
        return torch.where(torch.from_numpy(mask), 1.0, x[:, :1] * 0)


class MasksModel(Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.before(x)
        return {"drawn": self.part(y), "made": self.after(y)}


def plan_file(model: nn.Module, division: Division, folder: Path) -> str:
    ranks, microbatches, _ = division
    graph = graph_of(model, (torch.ones(ROWS, WIDTH),), {}, ROWS)
    cuts = possible_cuts(graph)
    file = folder / f"plan_{DIVISIONS.index(division)}.json"
    cut_plan(graph, [cuts[len(cuts) // 2]] if len(ranks) > 1 else [], ranks, microbatches).write(file)
    return str(file)


def drawn_in_calls(model: nn.Module, division: Division, file: str, calls: int) -> list[Tensor]:
    """What each call shows of this rank's rows; the script's own generators differ between ranks and stay."""
    module = pyrannc.RaNNCModule(model, load_deployment=file)
    random.seed(process.get_rank())
    np.random.seed(process.get_rank())
    before = other_states()
    shown = []
    for call in range(calls):
        torch.manual_seed(call)
        outputs = module(torch.ones(ROWS, WIDTH)[local_slice(division[2])])
        (outputs["drawn"].sum() * 0 + outputs["made"].sum()).backward()
        shown.append(outputs["drawn"].detach())
    assert other_states() == before, "the script's generators are left as they were"
    module.undeploy()
    return shown


def joined(found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """All ranks' rows of each call."""
    return [torch.cat(tensors) for tensors in zip(*found, strict=True)]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_what_runs_on_every_rank_draws_alike(division: Division, ranks: Ranks, tmp_path: Path) -> None:
    file = plan_file(Model(Mixes()), division, tmp_path)
    calls = joined(ranks(2).run(drawn_in_calls, Model(Mixes()), division, file, 3))
    for drawn in calls:
        assert torch.allclose(drawn, drawn[:1].expand_as(drawn))
    assert len({tuple(drawn[0].tolist()) for drawn in calls}) == 3
    assert len(set(calls[0][0].tolist())) == WIDTH


def test_a_layer_is_dropped_as_often_as_it_should_be(ranks: Ranks, tmp_path: Path) -> None:
    division = DIVISIONS[0]
    file = plan_file(Model(ShowsDrop()), division, tmp_path)
    calls = joined(ranks(2).run(drawn_in_calls, Model(ShowsDrop()), division, file, 150))
    by_rank = torch.stack([torch.stack([drawn[0, 0], drawn[-1, 0]]) for drawn in calls])
    assert 0.15 < by_rank.mean() < 0.35
    assert not torch.equal(by_rank[:, 0], by_rank[:, 1])


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_rows_get_masks_of_their_own(division: Division, ranks: Ranks, tmp_path: Path) -> None:
    file = plan_file(MasksModel(Masks()), division, tmp_path)
    for drawn in joined(ranks(2).run(drawn_in_calls, MasksModel(Masks()), division, file, 2)):
        assert len({tuple(row.tolist()) for row in drawn}) == ROWS
        assert all(3 <= row.eq(0).sum() <= 12 for row in drawn)


def train(draw: Callable[[], float], division: Division, file: str) -> list[str]:
    """What is wrong after some steps with layers that chance leaves out."""
    with double_precision():
        torch.manual_seed(3)
        model = Model(DropsLayer(draw))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = pyrannc.RaNNCModule(model, optimizer, load_deployment=file)
        own = torch.randn(ROWS, WIDTH)[local_slice(division[2])]
        start = [param.detach().clone() for param in model.part.parameters()]
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            module(own)["made"].square().sum().backward()
            optimizer.step()
        state = module.state_dict(rank0_only=False)
        module.eval()
        made = module(own)["made"]
        alone = Model(DropsLayer(draw)).eval()
        alone.load_state_dict(state)
        wrong = [] if torch.allclose(made, alone(own)["made"]) else ["evaluation is of other parameters"]
        trained = [state[f"part.{name}"] for name, _ in alone.part.named_parameters()]
        if not any(map(torch.equal, start, trained)) and all(map(torch.equal, start, trained)):
            wrong.append("no layer has trained")
        everywhere = agree.broadcast_object({name: tensor.clone() for name, tensor in state.items()})
        if not all(torch.equal(everywhere[name], tensor) for name, tensor in state.items()):
            wrong.append("ranks have other parameters")
        module.undeploy()
    return wrong


@pytest.mark.parametrize("draw", [by_python, by_numpy], ids=["python", "numpy"])
@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_layers_that_chance_leaves_out_train(
    draw: Callable[[], float], division: Division, ranks: Ranks, tmp_path: Path
) -> None:
    with double_precision():
        file = plan_file(Model(DropsLayer(draw)), division, tmp_path)
    assert ranks(2).run(train, draw, division, file) == [[], []]


class Writes(nn.Module):
    """Changes its argument by NumPy; the model reads that before and after."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(float(np.sign(np.abs(x.detach().numpy()).max())) * 0.5)
        return x


class WritesModel(Model):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = self.before(x)
        before = torch.tanh(y) * 2
        return self.after(before + y + self.part(y)).square().mean()  # type: ignore[no-any-return]


def beside_one_process(division: Division, file: str) -> list[str]:
    with double_precision():
        torch.manual_seed(3)
        model, alone = WritesModel(Writes()), WritesModel(Writes())
        alone.load_state_dict(model.state_dict())
        x = torch.randn(ROWS, WIDTH)
        module = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1), load_deployment=file)
        loss, expected = module(x[local_slice(division[2])]), alone(x)
        loss.backward()
        expected.backward()
        wrong = [] if torch.allclose(loss, expected) else ["the loss"]
        for name, param in alone.named_parameters():
            found, right = module.get_param_grad(name), param.grad
            assert found is not None
            assert right is not None
            if not torch.allclose(found, right):
                wrong.append(f"gradient of {name}")
        module.undeploy()
    return wrong


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_what_stays_whole_changes_its_argument(division: Division, ranks: Ranks, tmp_path: Path) -> None:
    with double_precision():
        file = plan_file(WritesModel(Writes()), division, tmp_path)
    assert ranks(2).run(beside_one_process, division, file) == [[], []]


class Asks(nn.Module):
    """Stays whole in part, as what draws from Python does, and asks what numbers that are drawn decide."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = DropsLayer(by_python), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.part(x)) * torch.rand(()).item()
        return x if bool((torch.rand(()) < 2).all()) else -x


def seeded_on_gpus() -> list[str]:
    found: set[str] = set()

    def note(*_: Any) -> None:
        found.add(next(frame.filename for frame in traceback.extract_stack()[-2::-1] if "torch" not in frame.filename))

    model = Asks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        mock.patch.object(torch.cuda, "manual_seed_all", note),
        mock.patch.object(torch.cuda, "manual_seed", note),
    ):
        module = pyrannc.RaNNCModule(model, optimizer)
        module(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()
    module.undeploy()
    return sorted(found)


def test_a_first_call_seeds_no_gpu_that_it_does_not_leave_as_it_was(ranks: Ranks) -> None:
    assert ranks(2).run(seeded_on_gpus, env={"RANNC_ENABLE_ZERO": "1"}) == [[], []]
