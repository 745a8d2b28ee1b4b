"""Trains a few steps with RaNNC and prints a line of JSON: the plan, and predicted against measured time and memory.

torchrun --standalone --nproc-per-node 4 benches/prediction.py bert 8 --sizes 24 1024 512 --memory-limits-gb 16 --tf32

With several memory limits or plan files there is a line for each, and for one that cannot run, why.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from models import add_model_arguments, loss_of, make_batch, make_model
from plans import describe
from torch import nn

import pyrannc
from pyrannc.core.plan import PlanFacts
from pyrannc.job import process
from pyrannc.ledger import Compared, Report

_GIB = 2**30


def main() -> int:
    options = parse()
    set_precision(options)
    os.environ["RANNC_PARTITION_NUM"] = str(options.stages)
    os.environ["RANNC_PIPELINE_NUM"] = str(options.microbatches)
    joined = process.ensure_process_group()
    for limit_gb in options.memory_limits_gb:
        os.environ["RANNC_MEM_LIMIT_GB"] = str(limit_gb)
        for plan_file in options.plans or [None]:
            result = attempt(options, plan_file, joined)
            if joined.rank == 0:
                asked = {"model": options.model, "sizes": options.sizes, "rows": options.rows}
                asked |= {"ranks": joined.world_size, "memory_limit_gb": limit_gb, "precision": precision(options)}
                print(json.dumps(asked | {"plan_file": plan_file and plan_file.name} | result), flush=True)
            gc.collect()
            empty_cache(joined.device)
    pyrannc.barrier()
    pyrannc.clear()
    return 0


def attempt(options: argparse.Namespace, plan_file: Path | None, joined: process.Process) -> dict[str, Any]:
    """What one training run gives, or why there is none; all ranks fail alike."""
    try:
        model, first_step_s = train(options, plan_file, joined)
    except pyrannc.RaNNCError as error:
        return {"failure": str(error)}
    report = model.report()
    if options.report and joined.rank == 0:
        print(report, file=sys.stderr)
    return facts(PlanFacts.from_content(model.plan), report) | {"first_step_s": round(first_step_s, 2)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("rows", type=int, help="rows of each rank's batch")
    parser.add_argument(
        "--memory-limits-gb", type=float, nargs="+", default=[0.0], help="of each device; 0 is all that it has"
    )
    parser.add_argument("--plans", type=Path, nargs="+", default=[], help="run these plan files instead of searching")
    parser.add_argument("--stages", type=int, default=0, help="force this number of Stages")
    parser.add_argument("--microbatches", type=int, default=0, help="force this number of microbatches")
    parser.add_argument("--dtype", default="float32", help="of the parameters")
    parser.add_argument("--tf32", action="store_true", help="TF32 in matrix products and convolutions")
    parser.add_argument("--autocast", action="store_true", help="call the model under autocast to bfloat16")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="timed steps; the ledger keeps the last ten")
    parser.add_argument("--report", action="store_true", help="print the whole ledger to stderr")
    return parser.parse_args()


def set_precision(options: argparse.Namespace) -> None:
    torch.set_default_dtype(getattr(torch, options.dtype))
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    torch.backends.cudnn.allow_tf32 = options.tf32


def precision(options: argparse.Namespace) -> str:
    return "autocast" if options.autocast else "TF32" if options.tf32 else str(options.dtype)


def train(
    options: argparse.Namespace, plan_file: Path | None, joined: process.Process
) -> tuple[pyrannc.RaNNCModule, float]:
    """The trained model, and the seconds from its first call to the end of its first step."""
    module = build(options, joined.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=joined.device.type == "cuda")
    model = pyrannc.RaNNCModule(module, optimizer, load_deployment=plan_file)
    batch = make_batch(options.model, options.rows, options.sizes, 0, joined.rank)
    on_device = {name: tensor.to(joined.device) for name, tensor in batch.items()}
    first_step_s, start = 0.0, time.perf_counter()
    # One more: a step is measured until the next one starts.
    for step in range(options.warmup + options.steps + 1):
        optimizer.zero_grad()
        with torch.autocast(joined.device.type, torch.bfloat16, enabled=options.autocast):
            loss = loss_of(model(**on_device))
        loss.backward()
        optimizer.step()
        if step == 0:
            synchronize(joined.device)
            first_step_s = time.perf_counter() - start
    return model, first_step_s


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model on the host; its weights are drawn on the device, which is much quicker."""
    with device:
        model = make_model(options.model, options.sizes, 0)
    model = model.cpu()
    empty_cache(device)
    return model


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def facts(plan: PlanFacts, report: Report) -> dict[str, Any]:
    """What is printed. Errors are shares of the measured; that of memory is the worst rank's."""
    peaks = [rank.peak_bytes for rank in report.ranks]
    worst = max(peaks, key=lambda peak: abs(peak.error or 0.0))
    return {
        "plan": describe(plan),
        "predicted_ms": scaled(report.step_us.predicted, 1e3),
        "measured_ms": scaled(report.step_us.measured, 1e3),
        "time_error": report.step_us.error,
        "predicted_gib": highest(peaks, "predicted"),
        "measured_gib": highest(peaks, "measured"),
        "memory_error": worst.error,
        "report": report.to_dict(),
    }


def highest(peaks: list[Compared], side: str) -> float | None:
    values = [getattr(peak, side) for peak in peaks]
    return None if None in values else scaled(max(values), _GIB)


def scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else round(value / unit, 3)


if __name__ == "__main__":
    sys.exit(main())
