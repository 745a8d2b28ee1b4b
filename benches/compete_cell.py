"""One system on one task, on the ranks of this start: prints its losses, times and memory as a line of JSON.

torchrun --nproc-per-node 2 benches/compete_cell.py rannc '{"model": "bert", "sizes": [2, 64, 32], "rows": 8}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from competitors import SHARES_ROWS, SYSTEMS, System, Task
from models import Batch, make_batch
from traces import kernels_us, messages, pauses_us, replays, traced, without_waits

from pyrannc.job import process

CHECKED = 10
"""Steps whose losses are compared."""
_MOST = 0.8
"""Of the time of kernels."""


def main() -> None:
    system, text = sys.argv[1:]
    task = task_of(json.loads(text))
    torch.set_float32_matmul_precision("high")
    device = process.ensure_process_group().device
    limit(task, device)
    made = SYSTEMS[system](task, device)
    shares = SHARES_ROWS[system]
    start = time.perf_counter()
    losses = [global_loss(made.step(own_batch(task, device, 0, shares)), shares)]
    first_s = time.perf_counter() - start
    losses += [global_loss(made.step(own_batch(task, device, seed, shares)), shares) for seed in range(1, CHECKED)]
    batch = own_batch(task, device, 0, shares)
    result = {"losses": losses, "first_s": first_s, **measured(made, batch, device), "plan": made.plan}
    result |= {"predicted_ms": made.predicted_ms, "memory_error": made.memory_error, "idle": idle(made, batch, device)}
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()


def idle(system: System, batch: Batch, device: torch.device) -> float | None:
    """The share of two steps in which no kernel works on this rank; those of NCCL do not while they wait for a peer.

    Where replays have most of what runs it is their share: around them the profiler holds the host up. Where ranks
    do not send each other the same, as in a pipeline, what waits cannot be told, and no kernel of NCCL counts as work.
    """
    events = traced(lambda: system.step(batch), 2, device)
    replayed = replays(events)
    counts = sum(map(kernels_us, replayed)) > _MOST * kernels_us(events)
    parts = replayed if counts else [events]
    everyone: list[list[list[float]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, [[event["dur"] for event in messages(part)] for part in parts])
    if len({tuple(map(len, of_rank)) for of_rank in everyone}) == 1:
        found = [
            pauses_us(without_waits(part, [min(of_ranks) for of_ranks in zip(*durations, strict=True)]))
            for part, durations in zip(parts, zip(*everyone, strict=True), strict=True)
        ]
    else:
        found = [pauses_us(part, but="nccl") for part in parts]
    whole_us = sum(span_us for span_us, _ in found)
    return sum(sum(pauses) for _, pauses in found) / whole_us if whole_us else None


def task_of(form: dict[str, Any]) -> Task:
    """A task of what JSON says of it."""
    return Task(**{**form, "sizes": tuple(form["sizes"])})


def limit(task: Task, device: torch.device) -> None:
    if task.limit_gib and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, task.limit_gib * 2**30 / whole), device)


def own_batch(task: Task, device: torch.device, seed: int, shares: bool) -> Batch:
    """This rank's rows of a global batch, or all of them."""
    ranks = dist.get_world_size()
    own = [dist.get_rank()] if shares else range(ranks)
    parts = [make_batch(task.model, task.rows // ranks, list(task.sizes), seed, rank) for rank in own]
    return {name: torch.cat([part[name] for part in parts]).to(device) for name in parts[0]}


def global_loss(loss: torch.Tensor, shares: bool) -> float:
    """The loss of the global batch: the ranks' mean, or the one that a rank has."""
    total = loss.double().clone()
    dist.all_reduce(total)
    return float(total) / (dist.get_world_size() if shares else 1)


def measured(system: System, batch: Batch, device: torch.device, seconds: float = 10.0) -> dict[str, Any]:
    """Milliseconds of a step, in several runs, and the most memory that torch has reserved on a rank."""
    cuda = device.type == "cuda"
    runs: list[float] = []
    steps = 1
    for run in range(6):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            system.step(batch)
        if cuda:
            torch.cuda.synchronize()
        took = torch.tensor((time.perf_counter() - start) * 1e3 / steps, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if run:
            runs.append(float(took))
        steps = max(1, min(50, int(seconds * 1e3 / 5 / float(took))))
    reserved = torch.tensor(torch.cuda.max_memory_reserved() if cuda else 0, device=device)
    dist.all_reduce(reserved, dist.ReduceOp.MAX)
    return {"ms": runs, "reserved_gib": float(reserved) / 2**30}


if __name__ == "__main__":
    main()
