"""What a step of 1F1B adds to a rank's memory, by Stages and microbatches: it must grow with the Stages that follow,
not with the microbatches.

    python benches/in_flight.py --stages 2 4 --microbatches 4 8 16

Each microbatch has as many rows as every other, so that more of them are a larger batch. On GPUs: the allocator's peak
above what lies there between steps; on the host: that of the resident set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import torch
from jobs import launcher
from torch import Tensor, nn

MIB = 2**20
LAYERS, WIDTH, NARROW = 16, 512, 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Tower(nn.Module):
    """Takes little in, gives a loss out, and has much in between."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(NARROW, WIDTH), nn.Linear(WIDTH, NARROW)
        self.layers = nn.Sequential(*(Residual() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.narrow(self.layers(self.widen(x))) - x).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rows", type=int, default=512, help="of a microbatch")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options.rows)
        return
    print(f"{'stages':>6} {'microbatches':>12}  {'schedule':10}  MiB that a step adds, by rank")
    for stages in options.stages:
        for microbatches in options.microbatches:
            asked = {"RANNC_PARTITION_NUM": str(stages), "RANNC_PIPELINE_NUM": str(microbatches)}
            # Large tensors go back to the system when they are freed, so that the resident set tells what lives; a
            # recorded step keeps its memory between steps.
            always = {
                "OMP_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "RANNC_LOG": "warning",
                "RANNC_PROFILE": "never",
                "RANNC_CUDA_GRAPHS": "off",
                "RANNC_COMPILE_SPANS": "off",
                "RANNC_SPLIT_BACKWARD": "false",
            }
            command = [*launcher(stages), __file__, "--rows", str(options.rows)]
            environment = {**always, **os.environ, **asked}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            schedule, added = json.loads(done.stdout.splitlines()[-1])
            figures = "  ".join(f"{bytes_ / MIB:8.1f}" for bytes_ in added)
            print(f"{stages:6} {microbatches:12}  {schedule:10}  {figures}", flush=True)


def measure(rows: int) -> None:
    """Rank 0 prints what a step adds to the memory of each rank, bytes."""
    import pyrannc
    from pyrannc.core.plan import PlanFacts
    from pyrannc.job import agree, process

    joined = process.ensure_process_group()
    own = rows * int(os.environ["RANNC_PIPELINE_NUM"]) // joined.world_size
    model = pyrannc.RaNNCModule(Tower(), gather_inputs=True)
    batch = torch.randn(own, NARROW, device=joined.device)
    added = []
    for _ in range(4):
        model.zero_grad()
        before = _start(joined.device)
        model(batch).backward()
        added.append(_peak(joined.device) - before)
    everyone = agree.gather_objects(added[-1])
    if joined.rank == 0:
        print(json.dumps([PlanFacts.from_content(model.plan).schedule, everyone]))
    pyrannc.barrier()
    pyrannc.clear()


def _start(device: torch.device) -> int:
    """Begins to watch the peak; returns what is there now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
