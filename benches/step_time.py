"""Times a training step of RaNNC beside DDP and FSDP2 on the same ranks, and prints a table.

    torchrun --nproc-per-node 2 benches/step_time.py bert 16 --sizes 24 1024 128 --stages 1

With ``--trace``, rank 0's profiler trace of two steps of each system is read for the share of time in which no
kernel runs on its GPU, for the part of it in long gaps (in which the GPU waits for the host), and for host calls that
wait.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from models import loss_of, make_batch, make_model
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from traces import pauses_us, traced

import pyrannc
from pyrannc.job import process

_LONG_GAP_US = 20
_WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    if options.stages:
        os.environ["RANNC_PARTITION_NUM"] = str(options.stages)
    device = process.ensure_process_group().device
    rows = []
    for name, build in (("DDP", with_ddp), ("FSDP2", with_fsdp), ("RaNNC", with_rannc)):
        if name.lower() not in options.systems:
            continue
        step, describe, close = build(options, device)
        milliseconds, peak = measure(step, device, options)
        rows.append((name, describe(), statistics.median(milliseconds), min(milliseconds), peak))
        if options.trace:
            trace(name, step, device)
        close()
    if process.get_rank() == 0:
        show(rows, options)
    pyrannc.clear()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["chain", "bert"])
    parser.add_argument("rows", type=int, help="rows of each rank's batch")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="HIDDEN LAYERS, or LAYERS HIDDEN SEQ")
    parser.add_argument("--stages", type=int, default=0, help="force RaNNC's number of Stages")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--systems", nargs="+", default=["ddp", "fsdp2", "rannc"])
    parser.add_argument("--trace", action="store_true", help="profile two steps")
    return parser.parse_args()


Step = Callable[[], None]


def with_ddp(options: argparse.Namespace, device: torch.device) -> tuple[Step, Callable[[], str], Step]:
    module = make_model(options.model, options.sizes, 0)
    on_gpu = [device.index] if device.type == "cuda" else None
    model = DistributedDataParallel(module.to(device), device_ids=on_gpu, gradient_as_bucket_view=True)
    return stepper(model, adam(model), options, device), lambda: "", lambda: None


def with_fsdp(options: argparse.Namespace, device: torch.device) -> tuple[Step, Callable[[], str], Step]:
    module = make_model(options.model, options.sizes, 0)
    model = module.to(device)
    layers = model.bert.encoder.layer if options.model == "bert" else model.layers
    for layer in layers:  # type: ignore[union-attr]  # a ModuleList in both
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return stepper(model, adam(model), options, device), lambda: "ZeRO-2-like", lambda: None


def with_rannc(options: argparse.Namespace, device: torch.device) -> tuple[Step, Callable[[], str], Step]:
    module = make_model(options.model, options.sizes, 0)
    optimizer = adam(module)
    model = pyrannc.RaNNCModule(module, optimizer)

    def describe() -> str:
        shape = " + ".join(str(len(stage["ranks"])) for stage in model.plan["stages"])
        predicted = max(sum(stage["predicted"]["memory"].values()) for stage in model.plan["stages"]) / 2**30
        step_ms = model.plan["predicted"]["step_us"] / 1e3
        return f"{shape}, {model.plan['microbatches']} mb; predicted {step_ms:.1f} ms, {predicted:.2f} GiB"

    return stepper(model, optimizer, options, device), describe, model.undeploy


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=torch.cuda.is_available())


def stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, device: torch.device
) -> Step:
    batch = make_batch(options.model, options.rows, options.sizes, 0, process.get_rank())
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(**on_device)).backward()
        optimizer.step()

    return step


def measure(step: Step, device: torch.device, options: argparse.Namespace) -> tuple[list[float], float]:
    """Milliseconds of each of several runs of steps, per step, and the peak memory of the slowest rank in GiB."""
    for _ in range(options.warmup):
        step()
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(4):
        pyrannc.barrier()
        start = time.perf_counter()
        for _ in range(options.steps // 4):
            step()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3 / (options.steps // 4))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return times, max(gathered(peak, device))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered(number: float, device: torch.device) -> list[float]:
    numbers = torch.empty(process.get_world_size(), device=device)
    pyrannc.all_gather(torch.tensor([number], device=device), numbers)
    return list(numbers.tolist())


def trace(name: str, step: Step, device: torch.device) -> None:
    """Profiles two steps on every rank and prints what rank 0's GPU waited for."""
    events = traced(step, 2, device)
    if process.get_rank() == 0:
        print(f"{name}: {summary(events)}")


def summary(events: list[dict[str, Any]]) -> str:
    span, gaps = pauses_us(events)
    idle, waiting = sum(gaps) / span, sum(gap for gap in gaps if gap > _LONG_GAP_US) / span
    calls: dict[str, int] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "gpu_memcpy") and event["name"].startswith((*_WAITING_CALLS, "Memcpy")):
            calls[event["name"]] = calls.get(event["name"], 0) + 1
    return (
        f"two steps take {span / 1e3:.2f} ms, no kernel runs {idle:.2%} of it, {waiting:.2%} in gaps of over "
        f"{_LONG_GAP_US} us; copies and waiting calls: {calls}"
    )


def show(rows: list[tuple[str, str, float, float, float]], options: argparse.Namespace) -> None:
    table = Table(
        "system", "plan", "ms a step (median)", "(best)", "peak GiB", title=f"{options.model} {options.sizes}"
    )
    for name, plan, median, best, peak in rows:
        table.add_row(name, plan, f"{median:.2f}", f"{best:.2f}", f"{peak:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
