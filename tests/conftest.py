"""Ranks that stay for all tests of a worker, and which tests begin first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that may take longest begin first, so that at the end no worker waits for one of them."""

    def most_s(item: pytest.Item) -> float:
        timeout = item.get_closest_marker("timeout")
        return 0.0 if timeout is None else float(timeout.args[0])

    items.sort(key=most_s, reverse=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Ranks by number of them."""
    pools: dict[int, RankPool] = {}

    def of_size(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield of_size
    for pool in pools.values():
        pool.close()
