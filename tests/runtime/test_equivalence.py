"""Outputs, gradients, buffers and trained parameters equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import RankPool

from .equivalence import Case, check

CASES = [
    # One rank: only microbatches.
    Case("chain", (7,), microbatches=3, optimizer="sgd"),
    Case("bert", (3,), microbatches=2, optimizer="adamw"),
    Case("parametrized", (7,), microbatches=3, optimizer="sgd"),
    Case("penalized", (7,), microbatches=3, optimizer="sgd"),
    Case("resnet50", (4,), microbatches=2, optimizer="sgd"),
    # Two ranks.
    Case("chain", (4, 4), stages=2, microbatches=8),
    Case("chain", (5, 2), stages=1, microbatches=2, input_grads=True),
    Case("fork_join", (3, 4), stages=2, microbatches=3, optimizer="sgd", input_grads=True),
    Case("loss_inside", (0, 5), stages=2, microbatches=3, input_grads=True),
    Case("conv_net", (4, 4), stages=2, microbatches=2),
    Case("conv_net", (5, 4), stages=1, microbatches=2, optimizer="sgd"),
    Case("tied", (1, 6), stages=2, microbatches=2),
    Case("keywords", (2, 3), stages=2, microbatches=2, input_grads=True),
    Case("two_scalars", (3, 1), stages=2, microbatches=2),
    Case("dict_output", (6, 2), stages=2, inputs="first", microbatches=3),
    Case("bert", (3, 2), stages=2, microbatches=3),
    Case("parametrized", (4, 4), stages=2, microbatches=4, input_grads=True),
    Case("penalized", (5, 2), stages=1, microbatches=2),
    Case("unled", (3, 4), microbatches=2),
    # Three ranks.
    Case("chain", (5, 3, 2), replicas=(2, 1), microbatches=3, input_grads=True),
    Case("skip", (2, 4, 1), stages=3, microbatches=3, optimizer="adamw"),
    Case("shared_input", (3, 0, 5), replicas=(1, 2), microbatches=2, input_grads=True),
    Case("tied", (3, 3, 3), stages=3, microbatches=2, optimizer="sgd"),
    Case("loss_inside", (7, 1, 1), replicas=(1, 2), inputs="first", microbatches=3, input_grads=True),
    Case("embedding", (1, 2, 4), replicas=(2, 1), microbatches=8),
    Case("loss_among_outputs", (3, 1, 4), replicas=(1, 2), microbatches=3),
    Case("transposed_output", (2, 3, 3), replicas=(2, 1), microbatches=2, input_grads=True),
    Case("conv_net", (4, 3, 4), stages=1, microbatches=2),
    Case("gpt2", (2, 2, 3), replicas=(1, 2), microbatches=2, optimizer="adamw"),
    Case("parametrized", (5, 3, 2), replicas=(2, 1), microbatches=3),
    Case("penalized", (2, 3, 3), replicas=(1, 2), microbatches=3, optimizer="sgd"),
    # Four ranks.
    Case("chain", (2, 2, 2, 2), stages=4, microbatches=3, optimizer="adamw"),
    Case("chain", (1, 3, 0, 2), replicas=(3, 1), microbatches=2, inputs="gathered", input_grads=True),
    Case("skip", (4, 1, 2, 2), replicas=(1, 2, 1), microbatches=8, input_grads=True),
    Case("fork_join", (3, 3, 2, 2), replicas=(2, 2), microbatches=2),
    Case("tied", (2, 3, 2, 1), replicas=(1, 1, 2), microbatches=3),
    Case("conv_net", (4, 4, 4, 4), replicas=(2, 2), microbatches=2, optimizer="sgd"),
    Case("in_place", (3, 2, 2, 2), stages=4, microbatches=2),
    Case("dict_output", (2, 2, 3, 2), replicas=(1, 3), microbatches=2),
    Case("loss_inside", (1, 0, 0, 1), replicas=(1, 2, 1), microbatches=8),
    Case("parametrized", (1, 0, 0, 1), replicas=(1, 2, 1), microbatches=8),
    Case("embedding", (5, 1, 1, 1), replicas=(2, 1, 1), microbatches=3, inputs="first"),
    Case("frozen", (2, 2, 2, 2), replicas=(2, 1, 1), microbatches=2, optimizer="adamw"),
    Case("shared_input", (2, 2, 2, 2), stages=4, microbatches=3, inputs="first", input_grads=True),
    Case("bert", (2, 1, 3, 2), replicas=(1, 2, 1), microbatches=3),
    Case("gpt2_labels", (2, 2, 2, 2), stages=4, microbatches=3, optimizer="sgd"),
    Case("resnet50", (1, 1, 1, 1), replicas=(2, 2), microbatches=1, optimizer="sgd"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    found = ranks(len(case.rows)).run(check, case, str(tmp_path))
    assert found == [[] for _ in case.rows]
