"""A training call on all ranks beside one process: what is equal is called equal, and what is not is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pyrannc
from pyrannc.proof.verdict import difference
from tests.ranks import RankPool

from .equivalence import environment, local_slice

Ranks = Callable[[int], RankPool]
ROWS = (3, 4)
WIDTH = 8


class Tied(nn.Module):
    """A table that is used twice, a buffer that counts, a loss over tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        made = self.head(self.middle(self.table(tokens)))
        return functional.cross_entropy(made.flatten(0, 1), targets.flatten(), ignore_index=0)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (sum(ROWS), 5), generator=torch.Generator().manual_seed(seed))


def train(stages: int, dropout: float, proven: bool) -> dict[str, Tensor]:
    """The state after two steps."""
    torch.manual_seed(0)
    model = Tied(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    items = {"PARTITION_NUM": stages, "PIPELINE_NUM": 2, "VERIFY_PARTITIONING": proven}
    with environment({f"RANNC_{name}": str(value).lower() for name, value in items.items()}):
        module = pyrannc.RaNNCModule(model, optimizer)
    own = local_slice(ROWS)
    for step in range(2):
        optimizer.zero_grad()
        module(tokens(step)[own], tokens(step + 9)[own]).backward()
        optimizer.step()
    state: dict[str, Tensor] = module.state_dict()
    module.undeploy()
    return state


def same_training(stages: int, dropout: float) -> bool:
    one, other = train(stages, dropout, proven=True), train(stages, dropout, proven=False)
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_proof_changes_nothing(ranks: Ranks, stages: int, dropout: float) -> None:
    assert all(ranks(2).run(same_training, stages, dropout))


class Remembers(Tied):
    """Keeps what it computes and how, for the script to look at."""

    shape: object = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.shape = tokens.shape
        self.middle.kept = [self.shape]  # type: ignore[assignment]  # modules take any attribute
        return super().forward(tokens, targets)


def kept_attributes() -> tuple[object, bool]:
    model = Remembers(0.0)
    with environment({"RANNC_VERIFY_PARTITIONING": "true"}):
        module = pyrannc.RaNNCModule(model)
    own = local_slice(ROWS)
    module(tokens(0)[own], tokens(9)[own]).backward()
    module.undeploy()
    return vars(model).get("shape"), "kept" in vars(model.middle)


def test_a_proof_leaves_no_attributes(ranks: Ranks) -> None:
    assert ranks(2).run(kept_attributes) == [(None, False)] * 2


class Centred(nn.Sequential):
    """Rows meet each other, so that what it returns is made for all of them at once.

    Terms of the last bias's gradient cancel each other: what is left of it are rounding errors.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # it gives more
        made = super().forward(x)
        centred = made - made.mean(0)
        return centred.square().mean(), centred


def prove_rows_that_meet() -> bool:
    torch.manual_seed(0)
    model = Centred(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    x = torch.randn(sum(ROWS), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with environment({"RANNC_PARTITION_NUM": "2", "RANNC_VERIFY_PARTITIONING": "true"}):
        module = pyrannc.RaNNCModule(model)
    loss, centred = module(x[local_slice(ROWS)])
    loss.backward()
    module.undeploy()
    return len(centred) == len(x[local_slice(ROWS)])


def test_outputs_of_rows_that_meet_are_those_of_all_ranks(ranks: Ranks) -> None:
    assert all(ranks(2).run(prove_rows_that_meet))


@pytest.mark.parametrize(("here", "is_real"), [(2e-17, False), (3e-15, True), (-0.5, True)])
def test_rounding_errors_that_are_left_of_a_gradient_are_no_difference(here: float, is_real: bool) -> None:
    found = difference("gradient", "bias", "", torch.full((2,), here).double(), torch.zeros(2).double(), 0.0, noise=1.0)
    assert found.is_real is is_real
    alone = difference("gradient", "bias", "", torch.full((2,), here).double(), torch.ones(2).double() * 1e-17, 0.0)
    assert alone.is_real


def normalised() -> str:
    """What a proof says of batch normalisation over microbatches, which is not that over the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))
    with environment({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2", "RANNC_VERIFY_PARTITIONING": "true"}):
        module = pyrannc.RaNNCModule(model)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(pyrannc.get_rank()))
    with pytest.raises(pyrannc.RaNNCError) as raised:
        module(x)
    module.undeploy()
    return str(raised.value)


def test_what_differs_is_named(ranks: Ranks) -> None:
    for text in ranks(2).run(normalised):
        assert "not what one process computes" in text
        assert 'first output that differs: "linear_1" (Stage 1' in text
        assert re.search('first gradient that differs: "0.weight" .first used by Stage 0, sub-module .0.', text), text
        assert "BatchNorm in training normalises over the rows in hand" in text
        assert "all equal" not in text.splitlines()[2], "the output differs"


SCRIPT = """
import sys
import torch
import pyrannc

module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
module.train(sys.argv[1] == "train")
model = pyrannc.RaNNCModule(module, torch.optim.SGD(module.parameters(), lr=0.1))
model.train(sys.argv[1] == "train")
for _ in range(2):
    model(torch.randn(8, 4)).sum().backward()
    print("went on", flush=True)
"""


@pytest.mark.parametrize(("mode", "status", "says"), [("eval", 0, "equal to one process"), ("train", 1, "NOT equal")])
def test_a_script_is_proven_and_ends(tmp_path: Path, mode: str, status: int, says: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "pyrannc", "proof", str(script), mode]
    env = dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == status, ended.stderr
    assert says in ended.stdout
    assert "went on" not in ended.stdout


def test_a_script_that_does_not_train(tmp_path: Path) -> None:
    missing = [sys.executable, "-m", "pyrannc", "proof", str(tmp_path / "missing.py")]
    ended = subprocess.run(missing, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 2
    assert "there is no script" in ended.stderr
