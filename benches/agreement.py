"""What it takes all ranks to tell each other five numbers, as at each call of a model, beside Gloo's all_gather.

    python benches/agreement.py --ranks 2 4 8

Ranks are processes of this host; with more of them than idle processors the times are those of the scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from jobs import launcher

NUMBERS = (3, 32, 1, 0x0123456789ABCDEF, 2**62)
WARM_UP = 200
WAYS = ("exchange", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.repeats)
        return
    print(f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}; us, median and best")
    print(f"{'ranks':>5}  {'exchange':>17}  {'Gloo':>17}")
    for ranks in options.ranks:
        command = [*launcher(ranks), __file__, "--repeats", str(options.repeats)]
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, stdout=subprocess.PIPE, check=True)
        times = json.loads(done.stdout)
        print(f"{ranks:5}  " + "  ".join(f"{times[way][0]:8.1f} {times[way][1]:8.1f}" for way in WAYS), flush=True)


def measure(repeats: int) -> None:
    """Rank 0 prints, for each way, the median and the best time of the slowest rank."""
    from pyrannc.job import agree, process
    from pyrannc.job.faults import collective

    group = process.control()
    own = torch.tensor([NUMBERS], dtype=torch.int64)
    everyone = torch.empty(process.get_world_size(), len(NUMBERS), dtype=torch.int64)

    def gloo() -> None:
        dist.all_gather_into_tensor(everyone, own, group=group)
        everyone.tolist()

    with collective("model(...)"):
        ways: tuple[Callable[[], object], ...] = (lambda: agree.gather_numbers(NUMBERS), gloo)
        found = {name: agree.gather_objects(times_us(way, repeats)) for name, way in zip(WAYS, ways, strict=True)}
    if process.get_rank() == 0:
        print(json.dumps({name: [max(column) for column in zip(*times, strict=True)] for name, times in found.items()}))


def times_us(way: Callable[[], object], repeats: int) -> tuple[float, float]:
    taken = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        way()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP:]) * 1e6, min(taken[WARM_UP:]) * 1e6


if __name__ == "__main__":
    main()
