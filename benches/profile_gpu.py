"""Profiles a model's distinct Blocks as the first call of a module would, and adds them up beside the whole model.

    torchrun --nproc-per-node 8 benches/profile_gpu.py bert --rows 8 --sizes 96 2048 512
    torchrun --nproc-per-node 1 benches/profile_gpu.py bert --rows 8 --sizes 24 1024 512 --whole

With ``--whole``, rank 0 also runs the model itself, for each number of rows that was measured: its forward and
backward should take as long as those of its Blocks together. Blocks keep more than the model does, because their
results count even if no backward needs them.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from models import add_model_arguments, loss_of, make_batch, make_model
from rich.console import Console
from rich.table import Table

import pyrannc
from pyrannc.call.variant import Variant
from pyrannc.call.whole_batch import BatchRows
from pyrannc.config import Config
from pyrannc.core.profile import ProfileFacts
from pyrannc.job import agree, process
from pyrannc.planning.machine import find_cluster, own_device
from pyrannc.planning.measured import find_profiles
from pyrannc.planning.search import Request
from pyrannc.profile.measure import is_out_of_memory
from pyrannc.profile.meter import Meter

_SUSTAINED_US = 2e6
_FIGURES = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us", "saved_bytes")


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision(options.precision)
    device = process.ensure_process_group().device
    start = time.monotonic()
    request = capture(options, device)
    captured = time.monotonic()
    ranks = agree.gather_objects(own_device(device))
    cluster = find_cluster(request.config, ranks)
    profiles = find_profiles(request, cluster, [rank.host for rank in ranks])
    profiled = time.monotonic()
    blocks = request.variant.graph.blocks().hashes
    if process.get_rank() == 0:
        distinct = f"{len(blocks)} blocks, {len(set(blocks))} distinct"
        print(f"{distinct}; capture {captured - start:.1f} s, profiling {profiled - captured:.1f} s")
        known = ProfileFacts.of(profiles[0])
        missing = set(blocks) - set(profiles[0].block_hashes)
        print(f"not measured: {sum(block in missing for block in blocks)} blocks, {len(missing)} distinct")
        print(json.dumps([asdict(level) for level in known.levels], indent=1))
        sums = add_up(known, blocks)
        show(sums, {rows: measure_whole(options, device, rows) for rows in sums} if options.whole else {})
    pyrannc.barrier()
    pyrannc.clear()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--rows", type=int, default=8, help="of each rank's batch")
    parser.add_argument(
        "--precision", default="high", choices=["highest", "high", "medium"], help="of float32 products"
    )
    parser.add_argument("--whole", action="store_true", help="measure the model itself, too")
    parser.add_argument("--cache", type=Path, default=None, help="folder for profiles; without it nothing is kept")
    return parser.parse_args()


def capture(options: argparse.Namespace, device: torch.device) -> Request:
    """Captures the model without memory for its parameters."""
    with torch.device("meta"):
        model = make_model(options.model, options.sizes, 0)
    batch = make_batch(options.model, options.rows, options.sizes, 0, process.get_rank())
    samples = {name: tensor.to(device) for name, tensor in batch.items()}
    rows = BatchRows((options.rows,) * process.get_world_size(), gathered=True)
    variant = Variant(model, (), samples, device, options.rows, (1,) * len(samples), rows)
    config = Config(
        profile="always", profile_cache=options.cache is not None, profile_cache_dir=str(options.cache or "")
    )
    tensors = variant.captured.input_tensors((), samples)
    return Request(variant, tensors, config, None, device, rows.total, gather_inputs=True)


Sums = dict[str, float]


def add_up(profile: ProfileFacts, blocks: list[str]) -> dict[int, Sums]:
    """The figures of all Blocks together, by rows; only where all fit."""
    known = [profile.blocks[block] for block in blocks if block in profile.blocks]
    shortest = min(sum(point.fits for point in block) for block in known)
    return {
        known[0][place].rows: {name: sum(getattr(block[place], name) for block in known) for name in _FIGURES}
        for place in range(shortest)
    }


def measure_whole(options: argparse.Namespace, device: torch.device, rows: int) -> Sums | None:
    """The figures of the model itself; None when it does not fit."""
    try:
        return _run_whole(options, device, rows)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        gc.collect()
        Meter(device).release()


def _run_whole(options: argparse.Namespace, device: torch.device, rows: int) -> Sums:
    with device:
        model = make_model(options.model, options.sizes, 0)
    batch = {name: tensor.to(device) for name, tensor in make_batch(options.model, rows, options.sizes, 0, 0).items()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    meter = Meter(device)

    def forward() -> torch.Tensor:
        return loss_of(model(**batch))

    forward_us = sustained_us(forward, meter)
    step_us = sustained_us(lambda: forward().backward(), meter)
    with meter.watch_memory() as memory:
        loss = forward()
        saved_bytes = memory.held_bytes()
    loss.backward()
    return {"forward_us": forward_us, "backward_us": step_us - forward_us, "saved_bytes": saved_bytes}


def sustained_us(call: Callable[[], object], meter: Meter) -> float:
    """Time of a call among many, for as long as a device needs to get warm."""
    once_us = meter.time_us(call)
    calls = max(3, int(_SUSTAINED_US / once_us))
    meter.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    meter.synchronize()
    return (time.perf_counter() - start) * 1e6 / calls


def show(sums: dict[int, Sums], wholes: dict[int, Sums | None]) -> None:
    table = Table("rows", "", "forward ms", "backward ms", "by input ms", "by weight ms", "saved MiB")
    for rows, blocks in sums.items():
        table.add_row(str(rows), "blocks", *cells(blocks))
        whole = wholes.get(rows)
        if whole is not None:
            table.add_row("", "whole", *cells(whole))
            ratios = {name: blocks[name] / whole[name] for name in ("forward_us", "backward_us")}
            table.add_row("", "ratio", *[f"{ratios[name]:.3f}" if name in ratios else "" for name in _FIGURES])
    Console(width=140).print(table)


def cells(figures: Sums) -> list[str]:
    units = {name: 2**20 if name.endswith("_bytes") else 1e3 for name in _FIGURES}
    return [f"{figures[name] / units[name]:.3f}" if name in figures else "" for name in _FIGURES]


if __name__ == "__main__":
    sys.exit(main())
