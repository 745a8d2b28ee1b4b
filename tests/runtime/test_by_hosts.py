"""Models that wait for the device inside, so that messages go by way of hosts: they equal one process all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from pyrannc.call.variant import Variant
from pyrannc.runtime import by_hosts, rehearsal
from pyrannc.runtime.by_hosts import ChannelsByHosts
from tests.ranks import RankPool

from .equivalence import Case, check

CASES = [
    Case("chain", (4, 4), stages=2, microbatches=8),
    Case("fork_join", (3, 4), stages=2, microbatches=3, optimizer="sgd", input_grads=True),
    Case("loss_inside", (0, 5), stages=2, microbatches=3, input_grads=True),
    Case("dict_output", (6, 2), stages=2, inputs="first", microbatches=3),
    Case("skip", (2, 4, 1), stages=3, microbatches=3, optimizer="adamw"),
    Case("tied", (3, 3, 3), stages=3, microbatches=2, optimizer="sgd"),
    Case("loss_inside", (7, 1, 1), replicas=(1, 2), inputs="first", microbatches=3, input_grads=True),
    Case("skip", (4, 1, 2, 2), replicas=(1, 2, 1), microbatches=8, input_grads=True),
    Case("bert", (2, 1, 3, 2), replicas=(1, 2, 1), microbatches=3),
    Case("chain", (2, 2, 3, 2), replicas=(2, 2), microbatches=3, sharding="gradients"),
    Case("chain", (2, 2, 3, 2), replicas=(2, 2), microbatches=3, sharding="params"),
    Case("chain", (9, 0), replicas=(2,), microbatches=8, sharding="gradients"),
    Case("chain", (4, 4), replicas=(1, 1), microbatches=3, schedule=["F0 F1 I0 F2 W0 B1 B2", "F0 B0 F1 I1 W1 F2 B2"]),
]


def job(case: Case, folder: str) -> tuple[list[str], int]:
    """What differs, and how often messages have gone by way of hosts from then on."""
    with (
        patch.multiple(rehearsal, is_needed=lambda *_: True, waits_noted=lambda _: nullcontext(["a place"])),
        patch.object(Variant, "whole_part", "a part"),
        patch.object(by_hosts, "ChannelsByHosts", wraps=ChannelsByHosts) as made,
    ):
        return check(case, folder), made.call_count


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case: Case, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    for differences, made in ranks(len(case.rows)).run(job, case, str(tmp_path)):
        assert differences == []
        assert made == 1
