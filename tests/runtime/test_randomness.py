"""What a call draws depends on torch's generator and on the place in the batch, on no Plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from pyrannc.blocks.randomness import draw_key
from pyrannc.job import agree, process
from tests.ranks import RankPool

from .equivalence import double_precision, local_slice
from .plans import cut_plan, graph_of, possible_cuts

WIDTH, ROWS = 6, 11
P = 0.3
Ranks = Callable[[int], RankPool]


class Draws(nn.Module):
    """Shows what its Ops draw: rows first, rows within, several lines a row, one for the whole batch."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        ones, rows = torch.ones_like(x), x.shape[0]
        lines, turned = ones.reshape(2 * rows, 2, WIDTH), ones.transpose(0, 1)
        images = ones[:, :, :, None].expand(-1, -1, -1, 2)
        weights = torch.sigmoid(x)
        return {
            "dropout": F.dropout(ones, P),
            "another dropout": F.dropout(ones.clone(), P, inplace=True),
            "lines": F.dropout(lines, P).reshape(x.shape),
            "turned": F.dropout(turned.contiguous(), P).transpose(0, 1),
            "strided": F.dropout(turned, P).transpose(0, 1) * 1.0,
            "alpha": F.alpha_dropout(ones, P, training=True),
            "features": F.dropout2d(images, P),
            "alpha features": F.feature_alpha_dropout(images, P, training=True),
            "uniform": torch.rand(rows, 4) + torch.empty(rows, 4).uniform_(-1, 3),
            "normal": torch.randn_like(x) + torch.normal(x, 2.0) + torch.empty_like(x).normal_(1, 2),
            "gumbel": F.gumbel_softmax(x, hard=True),
            "coins": torch.bernoulli(weights) + torch.empty_like(x).bernoulli_(0.2),
            "integers": torch.randint(3, 70, (rows, 4, WIDTH)) + torch.randint_like(x, 9).long(),
            "leaks": F.rrelu(-ones, training=True),
            "whole batch": x * 0 + torch.randn(WIDTH) + F.dropout(torch.ones(WIDTH), P),
            "kernel": F.scaled_dot_product_attention(x, x, x, dropout_p=P, is_causal=True),
        }


class Net(nn.Module):
    """Trains through dropout and noise of several forms; its loss is within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=P, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), P)
        x = x + self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]
        x = F.dropout(x.transpose(0, 1).contiguous(), P, inplace=True).transpose(0, 1)
        return (x * (1 + torch.randn_like(x)) + torch.randn(WIDTH)).square().mean()


@dataclass(frozen=True)
class Division:
    """Ranks of each Stage, cut at equal distances; rows of each rank."""

    ranks: tuple[tuple[int, ...], ...]
    microbatches: int
    rows: tuple[int, ...]


DIVISIONS = {
    1: [Division(((0,),), microbatches, (ROWS,)) for microbatches in (1, 2, 4)],
    2: [
        Division(((0, 1),), 1, (ROWS, 0)),
        Division(((0, 1),), 4, (4, 7)),
        Division(((0,), (1,)), 2, (7, 4)),
        Division(((1,), (0,)), 4, (6, 5)),
    ],
    3: [
        Division(((0, 1, 2),), 2, (3, 2, 6)),
        Division(((0, 2), (1,)), 4, (5, 6, 0)),
        Division(((2,), (0,), (1,)), 2, (4, 4, 3)),
        Division(((1,), (2, 0)), 1, (3, 3, 5)),
    ],
}


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 4, WIDTH, generator=torch.Generator().manual_seed(step))


Planned = tuple[Division, str]


def write_plans(make: Callable[[], nn.Module], divisions: Sequence[Division], folder: Path) -> list[Planned]:
    """A plan file for each division of a model."""
    graph = graph_of(make(), (batch(0),), {}, ROWS)
    cuts = possible_cuts(graph)
    planned = []
    for number, division in enumerate(divisions):
        stages = len(division.ranks)
        chosen = [cuts[len(cuts) * stage // stages] for stage in range(1, stages)]
        file = folder / f"plan_{sum(map(len, division.ranks))}_{number}.json"
        cut_plan(graph, chosen, division.ranks, division.microbatches).write(file)
        planned.append((division, str(file)))
    return planned


def plans_of(make: Callable[[], nn.Module], folder: Path) -> dict[int, list[Planned]]:
    """Those of all divisions, by number of ranks."""
    every = [division for divisions in DIVISIONS.values() for division in divisions]
    planned = write_plans(make, every, folder)
    return {ranks: [plan for plan in planned if plan[0] in divisions] for ranks, divisions in DIVISIONS.items()}


def show(planned: Sequence[Planned]) -> list[dict[str, Tensor]]:
    """This rank's rows of what is drawn, and what the whole batch is given alike, under each division."""
    shown = []
    for division, file in planned:
        module = pyrannc.RaNNCModule(Draws(), load_deployment=file)
        torch.manual_seed(2)
        outputs = module(batch(0)[local_slice(division.rows)])
        shown.append({name: tensor.detach() for name, tensor in outputs.items()})
        module.undeploy()
    return shown


def test_draws_do_not_depend_on_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    plans = plans_of(Draws, tmp_path)
    alone = ranks(1).run(show, plans[1][:1])[0][0]
    for world_size, planned in plans.items():
        by_rank = ranks(world_size).run(show, planned)
        for place, (division, _) in enumerate(planned):
            for name, expected in alone.items():
                found = torch.cat([shown[place][name] for shown in by_rank])
                # Attention sums what it draws, in an order of its own; all else is drawn and shown as it is.
                tolerance = 1e-5 if name == "kernel" else 0.0
                apart = (found.double() - expected.double()).abs().max().item()
                assert apart <= tolerance, f"{name}, {division}: differs by {apart}"
    kept = 1 / (1 - P)
    for name in ("dropout", "another dropout", "lines", "turned", "strided", "features"):
        assert sorted(alone[name].unique().tolist()) == [0.0, pytest.approx(kept)], name
    assert (alone["whole batch"] == alone["whole batch"][0, 0]).all()
    flat = [tensor.flatten()[: ROWS * 4 * WIDTH] for tensor in alone.values() if tensor.numel() >= ROWS * 4 * WIDTH]
    assert not any(torch.equal(one, other) for place, one in enumerate(flat) for other in flat[:place])
    for name in set(alone) - {"whole batch"}:
        assert not torch.equal(alone[name][0], alone[name][1]), name


def train(planned: Sequence[Planned]) -> list[list[Tensor]]:
    """Losses of some steps and the parameters after them, under each division."""
    trained = []
    with double_precision():
        for division, file in planned:
            torch.manual_seed(1)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            module = pyrannc.RaNNCModule(model, optimizer, load_deployment=file)
            torch.manual_seed(2)
            losses = []
            for step in range(3):
                losses.append(module(batch(step)[local_slice(division.rows)]))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            module.undeploy()
            trained.append([*[loss.detach() for loss in losses], *[param.detach() for param in model.parameters()]])
    return trained


def test_training_with_dropout_does_not_depend_on_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    with double_precision():
        plans = plans_of(Net, tmp_path)
    alone = ranks(1).run(train, plans[1][:1])[0][0]
    assert alone[0] != alone[1]
    for world_size, planned in plans.items():
        for by_division in ranks(world_size).run(train, planned):
            for (division, _), found in zip(planned, by_division, strict=True):
                pairs = zip(found, alone, strict=True)
                apart = max((mine - right).abs().max().item() for mine, right in pairs)
                assert apart < 1e-10, f"{division}: differs by {apart}"


TWO_STAGES = Division(((0,), (1,)), 2, (7, 4))
TWO_REPLICAS = Division(((0, 1),), 2, (7, 4))


def twice_dropped() -> nn.Module:
    return nn.Sequential(nn.Dropout(P), nn.Linear(WIDTH, 1), nn.Dropout(P))


def reproduce(planned: Planned) -> list[str]:
    """What is not as torch's generator says."""
    wrong = []

    def demand(truth: bool, text: str) -> None:
        if not truth:
            wrong.append(text)

    division, file = planned
    x = batch(0)[local_slice(division.rows)]
    models = [twice_dropped() for _ in "12"]
    models[1].load_state_dict(models[0].state_dict())
    modules = [pyrannc.RaNNCModule(model, load_deployment=file) for model in models]
    one, other = modules
    torch.manual_seed(0)
    start = torch.get_rng_state()
    first, second = one(x), one(x)
    demand(not torch.equal(start, torch.get_rng_state()), "a call that draws moves the generator")
    demand(not torch.equal(first, second), "two calls draw differently")
    demand(not torch.equal(second, other(x)), "two modules draw differently")
    torch.set_rng_state(start)
    demand(torch.equal(first, one(x)), "a saved state brings the numbers back")
    for module in modules:
        torch.manual_seed(5)
        module(x)
        after = torch.rand(3)
        module.eval()
        torch.manual_seed(5)
        module(x)
        demand(torch.equal(torch.rand(3), torch.rand(6, generator=torch.Generator().manual_seed(5))[:3]), "eval draws")
        module.train()
        torch.manual_seed(5)
        again = module(x)
        demand(torch.equal(torch.rand(3), after), "a call always moves the generator as far")
        torch.manual_seed(5)
        demand(torch.equal(again, module(x)), "a seed brings the numbers back")
        # Ranks whose generators were alike still are: they may shuffle data with them.
        mine = torch.rand(4)
        demand(torch.equal(mine, agree.broadcast_object(mine)), "ranks move alike")
    # Rank 0's generator counts.
    torch.manual_seed(7 + process.get_rank())
    mixed = one(x)
    torch.manual_seed(7)
    demand(torch.equal(mixed, one(x)), "rank 0's generator gives the key")
    for module in modules:
        module.undeploy()
    return wrong


def test_draws_follow_the_generator_of_torch(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(reproduce, *write_plans(twice_dropped, [TWO_STAGES], tmp_path)) == [[], []]


def train_long(planned: Planned) -> list[Tensor]:
    division, file = planned
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    module = pyrannc.RaNNCModule(model, optimizer, load_deployment=file)
    losses = []
    for step in range(20):
        loss = module(batch(step)[local_slice(division.rows)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    module.undeploy()
    return [torch.stack(losses), *[param.detach() for param in module.model.parameters()]]


def test_a_script_run_twice_gives_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    planned = write_plans(Net, [TWO_REPLICAS], tmp_path)
    first, again = (ranks(2).run(train_long, *planned) for _ in range(2))
    for mine, right in zip(first, again, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, right, strict=True))
    assert len(first[0][0].unique()) == 20


class Kernels(nn.Module):
    """Draws inside of torch's own kernels, and inside of a mapped function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=P)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mapped = torch.vmap(lambda row: F.dropout(row, P), randomness="different")(torch.ones_like(x))
        ordered = x * 0 + torch.randperm(WIDTH)
        return self.rnn(torch.tanh(self.layer(x)))[0], mapped, ordered


def show_kernels(planned: Sequence[Planned]) -> list[list[Tensor]]:
    shown = []
    for division, file in planned:
        torch.manual_seed(1)
        module = pyrannc.RaNNCModule(Kernels(), load_deployment=file)
        x = batch(0)[local_slice(division.rows)]
        torch.manual_seed(2)
        shown.append([tensor.detach() for tensor in module(x)])
        after = torch.rand(2)
        torch.manual_seed(2)
        draw_key()
        assert torch.equal(torch.rand(2), after), "what kernels draw does not move the user's generator"
        module.undeploy()
    return shown


def test_kernels_of_torch_draw_the_same_under_one_plan(ranks: Ranks, tmp_path: Path) -> None:
    planned = write_plans(Kernels, [TWO_STAGES, TWO_REPLICAS], tmp_path)
    by_rank = ranks(2).run(show_kernels, [planned[0], *planned])
    one, again, other = (
        [torch.cat(parts) for parts in zip(*shown, strict=True)] for shown in zip(*by_rank, strict=True)
    )
    assert all(torch.equal(mine, right) for mine, right in zip(one, again, strict=True))
    assert not torch.equal(one[1], other[1])
    for _, mapped, order in (one, other):
        assert not any(torch.equal(mapped[row], mapped[before]) for row in range(ROWS) for before in range(row))
        assert (order == order[0, 0]).all()
        assert sorted(order[0, 0].tolist()) == list(range(WIDTH))
