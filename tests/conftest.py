"""Ranks that stay for all tests of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.ranks import RankPool


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
