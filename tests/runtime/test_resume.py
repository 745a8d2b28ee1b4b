"""What torch's own calls save is all that a training needs to go on, in new processes, as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import pyrannc
from tests.ranks import RankPool, run_ranks

from .equivalence import double_precision, environment

Ranks = Callable[[int], RankPool]
WIDTH = 6
SAVED_AFTER, STEPS = 2, 4


def train(file: str, *, resume: bool) -> list[Tensor]:
    """Losses of the steps; a training that starts saves after some of them, one that resumes begins there."""
    with double_precision(), environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}):
        torch.manual_seed(pyrannc.get_rank() + (100 if resume else 1))
        net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)
        )
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model = pyrannc.RaNNCModule(net, optimizer)
        if resume:
            saved = torch.load(file)
            with torch.no_grad():
                model(rows(0))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"], from_global=True)
            torch.set_rng_state(saved["generator"])
        losses = []
        for step in range(SAVED_AFTER if resume else 0, STEPS):
            if step == SAVED_AFTER and not resume:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(from_global=True),
                    "generator": torch.get_rng_state(),
                }
                if pyrannc.get_rank() == 0:
                    torch.save(state, file)
            optimizer.zero_grad()
            loss = model(rows(step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        losses += model.state_dict(rank0_only=False).values()
        model.undeploy()
        return losses


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + pyrannc.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def test_a_training_with_dropout_goes_on_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    file = str(tmp_path / "saved.pt")
    whole = ranks(2).run(train_from_start, file)
    later = run_ranks(2, train_again, file)
    for there, here in zip(whole, later, strict=True):
        assert len(there) - SAVED_AFTER == len(here)
        assert all(map(torch.equal, there[SAVED_AFTER:], here))


def train_from_start(file: str) -> list[Tensor]:
    return train(file, resume=False)


def train_again(file: str) -> list[Tensor]:
    return train(file, resume=True)
