"""Ranks that stay for all tests of a worker, and which tests begin first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool, RankPools

# Else each process that compiles for CPUs tries out their vector instructions first, which takes it 10 to 16 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take longest begin first, so that at the end no worker waits for one of them."""

    def most_s(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return 0.0 if timeout is None else float(timeout.args[0])

    items.sort(key=most_s, reverse=True)


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Ranks that wait for jobs."""
    made = RankPools()
    yield made
    made.close()


@pytest.fixture
def ranks(pools: RankPools) -> Callable[[int], RankPool]:
    """Ranks by number of them; they stay for a test, and mostly for the next ones."""
    pools.tidy()
    return pools.of_size
