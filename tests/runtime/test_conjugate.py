"""Views that leave it to who reads them to conjugate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import pyrannc
from tests.ranks import RankPool

from .equivalence import Differences, local_slice
from .plans import cut_plan, graph_of, main_op_count, possible_cuts

Ranks = Callable[[int], RankPool]

ROWS = (3, 1)


class Turned(nn.Module):
    """Turns complex numbers, and mirrors them."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        first = (z * self.turns).conj()
        return first, (first * self.turns).conj()


def squares(outputs: tuple[Tensor, Tensor]) -> Tensor:
    """Of each row."""
    first, second = outputs
    return (first.abs().square() + second.abs().square()).sum(1)


def conjugated(folder: str) -> list[str]:
    torch.manual_seed(0)
    model, rows, differences = Turned(), local_slice(ROWS), Differences()
    plain, whole = copy.deepcopy(model), torch.randn(sum(ROWS), 4, dtype=torch.complex128, requires_grad=True)
    own = whole.detach()[rows].requires_grad_()
    graph = graph_of(model, (whole.conj(),), {}, sum(ROWS))
    middle = min(possible_cuts(graph), key=lambda cut: abs(2 * cut - main_op_count(graph)))
    file = Path(folder) / f"plan{pyrannc.get_rank()}"
    cut_plan(graph, [middle], [[0], [1]], 2).write(file)
    wrapped = pyrannc.RaNNCModule(model, None, load_deployment=file)
    found, expected = wrapped(own.conj()), plain(whole.conj())
    squares(found).sum().backward()
    # The ranks' losses count as much as their rows.
    (squares(expected) * (torch.tensor(ROWS) / sum(ROWS)).repeat_interleave(torch.tensor(ROWS))).sum().backward()
    assert whole.grad is not None
    differences.compare("outputs", found, tuple(output[rows] for output in expected))
    differences.compare("gradient of the input", own.grad, whole.grad[rows])
    differences.compare("gradient of the parameter", wrapped.get_param_grad("turns"), plain.turns.grad)
    wrapped.undeploy()
    return differences.found


def test_conjugated_views_go_between_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(conjugated, str(tmp_path)) == [[], []]
