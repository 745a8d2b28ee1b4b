"""What the start of a training takes, step by step, for a model of three Ops on the host.

    python benches/start.py --ranks 1 2

Times of the slowest rank, and how much of them the processor worked: they differ where others use it too, and where
ranks wait for one another. A second run finds Python's compiled files. An optimizer imports much of torch that the
first call of RaNNC would have to import otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--one", action="store_true", help="be one of the ranks")
    options = parser.parse_args()
    if options.one:
        start()
        return
    print(f"{len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}; s, by the clock and of work")
    for ranks in options.ranks:
        print(f"\n{ranks} rank{'s' if ranks > 1 else ''}")
        for name, wall_s, work_s in table(ranks):
            print(f"{name:24} {wall_s:6.2f} {work_s:6.2f}", flush=True)


def table(ranks: int) -> list[tuple[str, float, float]]:
    """Of each step its name, and the longest times of any rank."""
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561", "LOCAL_WORLD_SIZE": str(ranks)}
    common = {"OMP_NUM_THREADS": "1", **os.environ, "RANNC_LOG": "error", **port}
    started = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        command = [sys.executable, __file__, "--one"]
        started.append(subprocess.Popen(command, env={**common, **place}, stdout=subprocess.PIPE, text=True))
    found: list[list[tuple[str, float, float]]] = [json.loads(process.communicate()[0]) for process in started]
    return [(step[0][0], max(row[1] for row in step), max(row[2] for row in step)) for step in zip(*found, strict=True)]


def start() -> None:
    """Prints, for each step of a training's start, its name and two times."""
    steps: list[tuple[str, float, float]] = []
    last = time.perf_counter(), time.process_time()

    def note(name: str) -> None:
        nonlocal last
        now = time.perf_counter(), time.process_time()
        steps.append((name, now[0] - last[0], now[1] - last[1]))
        last = now

    import torch

    note("import torch")
    torch.set_num_threads(1)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    note("torch's optimizer")
    import pyrannc

    model = pyrannc.RaNNCModule(module, optimizer)
    note("import pyrannc")
    pyrannc.barrier()
    note("the ranks meet")

    def step() -> None:
        out: Tensor = model(torch.ones(4, 8))
        note("a call")
        out.square().mean().backward()
        optimizer.step()
        note("backward and step")

    step()
    step()
    step()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
