"""What messages and sums between ranks cost, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyrannc.core.profile import LevelPoint, LinkPoint
from pyrannc.job import agree, process
from pyrannc.job.exchange import Group, between_pairs

_SMALL_BYTES = 1 << 12
_LARGE_BYTES = 1 << 25
"""Of the order of a bucket of gradients, and of what one Stage sends to the next."""
_HOST_LARGE_BYTES = 1 << 22
_PRODUCTS = (4096, 1024), (1024, 4096), (4096, 1024)
_BUCKETS = 8
_SERIES = 5
_CALLS = 5
_WARM_UPS = 3


def measure_links(hosts: Sequence[str], level_names: Sequence[str], device: torch.device) -> list[LevelPoint]:
    """Measures the links inside hosts and between them, where there are such. All ranks call it.

    Args:
        hosts: the host of each rank.
        level_names: the levels, from those inside a host outwards; the first and the last are measured.
    """
    inside = [rank for rank, host in enumerate(hosts) if host == hosts[0]]
    between = [hosts.index(host) for host in dict.fromkeys(hosts)]
    measured = [
        LevelPoint(name, *_measure_level(ranks, device))
        for name, ranks in ((level_names[0], inside), (level_names[-1], between))
        if len(ranks) > 1
    ]
    return measured


def measure_products_slowdown(device: torch.device) -> float | None:
    """By what share of its own time a sum over all ranks prolongs a transformer's matrix products. All ranks call it.

    Returns:
        None on a host that computes itself.
    """
    if device.type != "cuda":
        return None
    return measure_collective_slowdown(buckets_to_sum(device), transformer_products(device))


def buckets_to_sum(device: torch.device) -> list[Tensor]:
    """What is summed beside computations."""
    return [torch.randn(_LARGE_BYTES // 4, device=device) for _ in range(_BUCKETS)]


def measure_collective_slowdown(buckets: Sequence[Tensor], compute: Callable[[int], object]) -> float:
    """By what share of its own time a sum over all ranks prolongs what is computed beside it. All ranks call it.

    Args:
        buckets: on this rank's GPU.
        compute: computes so many times.
    """
    device = buckets[0].device

    def reduce() -> list[dist.Work | None]:
        # A mean is a sum whose numbers stay finite.
        return [dist.all_reduce(bucket, dist.ReduceOp.AVG, process.world(), async_op=True) for bucket in buckets]

    def beside(times: int) -> None:
        works = reduce()
        compute(times)
        _wait(works)

    reduce_us = _time_us(lambda: _wait(reduce()), device)
    # All ranks compute for as long, about twice as long as they reduce.
    times = agree.broadcast_object(1 + int(2 * reduce_us / _time_us(lambda: compute(1), device)))
    compute_us, beside_us = _time_us(lambda: compute(times), device), _time_us(lambda: beside(times), device)
    return max(0.0, (beside_us - compute_us) / reduce_us)


def transformer_products(device: torch.device) -> Callable[[int], None]:
    """Does so many times what a layer of a transformer does behind its attention."""
    # Where all numbers are alike a device at its power limit is faster.
    rows, first, second = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in _PRODUCTS)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.nn.functional.gelu(rows @ first) @ second

    return compute


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "an asynchronous all-reduce returns its work"
        work.wait()


def _measure_level(ranks: list[int], device: torch.device) -> tuple[LinkPoint, LinkPoint]:
    """Messages and sums between ``ranks``, which no inner level joins. All ranks call it."""
    own, first, second = process.get_rank(), ranks[0], ranks[1]
    channel = between_pairs() if device.type == "cuda" else process.world()
    send = _measure_send(first, second, channel, device) if own in (first, second) else None
    process.barrier()
    if channel is not process.world():
        dist.destroy_process_group(channel)
    group = process.world() if len(ranks) == process.get_world_size() else dist.new_group(ranks)
    collective = _measure_collective(group, device) if own in ranks else None
    if own in ranks and group is not process.world():
        dist.destroy_process_group(group)
    found: tuple[LinkPoint, LinkPoint] = agree.gather_objects((send, collective))[first]
    return found


def _measure_send(first: int, second: int, channel: Group, device: torch.device) -> LinkPoint:
    """A message there and back, as Stages send it."""

    def there_and_back(tensor: Tensor) -> None:
        for source, destination in ((first, second), (second, first)):
            if process.get_rank() == source:
                work = dist.isend(tensor, destination, group=channel)
            else:
                work = dist.irecv(tensor, source, group=channel)
            assert work is not None, "both are members"
            work.wait()

    small_us, large_us, large_bytes = _two_sizes(there_and_back, device)
    latency_us = small_us / 2
    return LinkPoint(latency_us, _bytes_per_s(large_bytes, large_us / 2, latency_us))


def _measure_collective(group: dist.ProcessGroup, device: torch.device) -> LinkPoint:
    """Sums: a small one goes up and down a tree, of a large one every member passes on parts around a ring."""
    members = group.size()
    small_us, large_us, large_bytes = _two_sizes(lambda tensor: dist.all_reduce(tensor, group=group), device)
    latency_us = small_us / (2 * math.ceil(math.log2(members)))
    steps = 2 * (members - 1)
    return LinkPoint(latency_us, _bytes_per_s(steps * large_bytes // members, large_us, steps * latency_us))


def _bytes_per_s(size: int, whole_us: float, latency_us: float) -> float:
    """Bandwidth without the latency, of which a disturbed measurement does not make too much."""
    return size / max(whole_us - latency_us, whole_us / 2) * 1e6


def _two_sizes(call: Callable[[Tensor], object], device: torch.device) -> tuple[float, float, int]:
    """Times for a small and for a large tensor, and the large one's bytes."""
    large_bytes = _LARGE_BYTES if device.type == "cuda" else _HOST_LARGE_BYTES
    small, large = (torch.zeros(size // 4, device=device) for size in (_SMALL_BYTES, large_bytes))
    return _time_us(lambda: call(small), device), _time_us(lambda: call(large), device), large_bytes


def _time_us(call: Callable[[], object], device: torch.device) -> float:
    """Time of a call, in the least disturbed of several series of them. All who take part make as many."""
    for _ in range(_WARM_UPS):
        call()
    series_us = []
    for _ in range(_SERIES):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(_CALLS):
            call()
        _synchronize(device)
        series_us.append((time.perf_counter() - start) * 1e6 / _CALLS)
    return min(series_us)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
