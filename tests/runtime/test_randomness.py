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
from pyrannc.job import agree, process
from tests.ranks import RankPool

from .equivalence import double_precision, local_slice
from .plans import cut_plan, graph_of, possible_cuts

WIDTH, ROWS = 6, 11
P = 0.3
Ranks = Callable[[int], RankPool]


class Draws(nn.Module):
    """Shows what its Ops draw: rows first, rows within, several lines a row, one for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=P, batch_first=True)

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
            "heads": self.attention(x, x, x, need_weights=False)[0] + self.attention(x, x, x)[0],
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


def deploy(model: nn.Module, division: Division, folder: str) -> pyrannc.RaNNCModule:
    """The model under a Plan of this division."""
    file = Path(folder) / "plan.json"
    if process.get_rank() == 0:
        graph = graph_of(model, (batch(0),), {}, ROWS)
        cuts, stages = possible_cuts(graph), len(division.ranks)
        chosen = [cuts[len(cuts) * stage // stages] for stage in range(1, stages)]
        cut_plan(graph, chosen, division.ranks, division.microbatches).write(file)
    pyrannc.barrier()
    return pyrannc.RaNNCModule(model, load_deployment=file)


def show(divisions: Sequence[Division], folder: str) -> list[dict[str, Tensor]]:
    """This rank's rows of what is drawn, and what the whole batch is given alike, under each division."""
    shown = []
    for division in divisions:
        torch.manual_seed(1)
        module = deploy(Draws(), division, folder)
        torch.manual_seed(2)
        outputs = module(batch(0)[local_slice(division.rows)])
        shown.append({name: tensor.detach() for name, tensor in outputs.items()})
        module.undeploy()
    return shown


def test_draws_do_not_depend_on_the_plan(ranks: Ranks, tmp_path: Path) -> None:
    alone = ranks(1).run(show, DIVISIONS[1][:1], str(tmp_path))[0][0]
    for world_size, divisions in DIVISIONS.items():
        by_rank = ranks(world_size).run(show, divisions, str(tmp_path))
        for place, division in enumerate(divisions):
            for name, expected in alone.items():
                found = torch.cat([shown[place][name] for shown in by_rank])
                # Attention sums what it draws, in an order of its own; all else is drawn and shown as it is.
                tolerance = 1e-5 if name in ("kernel", "heads") else 0.0
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


def train(divisions: Sequence[Division], folder: str) -> list[list[Tensor]]:
    """Losses of some steps and the parameters after them, under each division."""
    trained = []
    with double_precision():
        for division in divisions:
            torch.manual_seed(1)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            module = deploy(model, division, folder)
            module.optimizer = optimizer
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
    alone = ranks(1).run(train, DIVISIONS[1][:1], str(tmp_path))[0][0]
    assert alone[0] != alone[1]
    for world_size, divisions in DIVISIONS.items():
        for by_division in ranks(world_size).run(train, divisions, str(tmp_path)):
            for division, found in zip(divisions, by_division, strict=True):
                pairs = zip(found, alone, strict=True)
                apart = max((mine - right).abs().max().item() for mine, right in pairs)
                assert apart < 1e-10, f"{division}: differs by {apart}"


def reproduce(folder: str) -> list[str]:
    """What is not as torch's generator says."""
    wrong = []

    def demand(truth: bool, text: str) -> None:
        if not truth:
            wrong.append(text)

    division = Division(((0,), (1,)), 2, (7, 4))
    x = batch(0)[local_slice(division.rows)]
    modules = [deploy(nn.Sequential(nn.Dropout(P), nn.Linear(WIDTH, 1), nn.Dropout(P)), division, folder) for _ in "12"]
    one, other = modules
    start = torch.get_rng_state()
    modules[1].load_state_dict(one.model.state_dict())
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
    assert ranks(2).run(reproduce, str(tmp_path)) == [[], []]


def train_long(folder: str) -> list[Tensor]:
    division = Division(((0, 1),), 2, (6, 5))
    torch.manual_seed(3)
    module = deploy(Net(), division, folder)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
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
    first, again = (ranks(2).run(train_long, str(tmp_path)) for _ in range(2))
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


def show_kernels(folder: str) -> list[list[Tensor]]:
    shown = []
    for division in [
        Division(((0,), (1,)), 2, (7, 4)),
        Division(((0,), (1,)), 2, (7, 4)),
        Division(((0, 1),), 2, (7, 4)),
    ]:
        torch.manual_seed(1)
        module = deploy(Kernels(), division, folder)
        torch.manual_seed(2)
        shown.append([tensor.detach() for tensor in module(batch(0)[local_slice(division.rows)])])
        after = torch.rand(2)
        torch.manual_seed(2)
        module(batch(0)[local_slice(division.rows)])
        assert torch.equal(torch.rand(2), after), "what kernels draw moves the user's generator no further"
        module.undeploy()
    return shown


def test_kernels_of_torch_draw_the_same_under_one_plan(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks(2).run(show_kernels, str(tmp_path))
    one, again, other = (
        [torch.cat(parts) for parts in zip(*shown, strict=True)] for shown in zip(*by_rank, strict=True)
    )
    assert all(torch.equal(mine, right) for mine, right in zip(one, again, strict=True))
    assert not torch.equal(one[1], other[1])
    for _, mapped, order in (one, other):
        assert not any(torch.equal(mapped[row], mapped[before]) for row in range(ROWS) for before in range(row))
        assert (order == order[0, 0]).all()
        assert sorted(order[0, 0].tolist()) == list(range(WIDTH))
