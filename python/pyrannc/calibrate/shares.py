"""What a device reaches: its peaks, the shares of them by kind and size of op, and its overheads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from pyrannc.calibrate.workloads import Workload, Workloads
from pyrannc.job import process
from pyrannc.job.progress import Bar
from pyrannc.profile.links import transformer_products
from pyrannc.profile.measure import is_out_of_memory
from pyrannc.profile.meter import Meter

_LONGEST_US = {"cuda": 1e5, "cpu": 1e4}
"""An op that takes longer than this is large enough: no larger one of its kind is tried."""
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "half": torch.bfloat16}
_KINDS = ("matrix", "convolution", "attention")
_TINY_SERIES = 5
_MOVERS = ("pointwise", "normalisation", "embedding", "optimizer")
_COPY_BYTES = 1 << 28

Speed = tuple[float, float]
"""Work, and work a second."""
Figures = dict[str, Any]
"""Fields of a device in a cluster file."""


def measure_device(device: torch.device) -> Figures:
    """Peaks, shares of them, and overheads, as the fields of a cluster file's device.

    A peak is the most that any matrix product, or pointwise op, has reached.
    """
    classes = [name for name in _DTYPES if name != "tf32" or device.type == "cuda"]
    workloads, meter, longest_us = Workloads(device), Meter(device), _LONGEST_US[device.type]
    figures: Figures = {}
    efficiency: Figures = {kind: {} for kind in _KINDS}
    with Bar("calibrating", len(classes) + 1, len(classes) + 1, shown=process.get_rank() == 0) as bar:
        for name in classes:
            with _tf32(device, name == "tf32"):
                speeds = {kind: _speeds(meter, getattr(workloads, kind)(_DTYPES[name]), longest_us) for kind in _KINDS}
            peak = max(speed for _, speed in speeds["matrix"])
            figures[f"{name}_tflops"] = peak / 1e12
            for kind in _KINDS:
                efficiency[kind][name] = _shares(speeds[kind], peak)
            bar.advance(1)
        if "tf32" not in classes:
            figures["tf32_tflops"] = figures["fp32_tflops"]
        movers = {kind: _speeds(meter, getattr(workloads, kind)(), longest_us) for kind in _MOVERS}
        peak = max(speed for _, speed in movers["pointwise"])
        figures["memory_gb_per_s"] = peak / 1e9
        efficiency.update({kind: _shares(speeds, peak) for kind, speeds in movers.items()})
        for kind in _KINDS:
            efficiency[kind]["bytes"] = efficiency["pointwise"]
        tiny, ops = workloads.tiny()
        figures["launch_us"] = meter.host_us([tiny] * _TINY_SERIES) / ops
        bar.advance(1)
    return {**figures, **_gpu_figures(device), "efficiency": efficiency}


@contextmanager
def _tf32(device: torch.device, enabled: bool) -> Iterator[None]:
    """Single precision with or without TF32."""
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]  # it is made at import
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def _speeds(meter: Meter, workloads: Iterable[Workload], longest_us: float) -> list[Speed]:
    """Work a second for works of increasing size, as far as memory and patience go."""
    points: list[Speed] = []
    try:
        for workload in workloads:
            us = meter.time_us(workload.call)
            points.append((workload.work, workload.total / us * 1e6))
            meter.release()
            if us > longest_us:
                break
    except RuntimeError as error:
        if not is_out_of_memory(error) or not points:
            raise
    return points


def _shares(speeds: Sequence[Speed], peak: float) -> list[list[float]]:
    """Shares of a peak by work; those by which more work would be done sooner are left out."""
    kept: list[list[float]] = []
    for work, speed in speeds:
        if not kept or work / (speed / peak) > kept[-1][0] / kept[-1][1]:
            kept.append([work, speed / peak])
    return kept


def _gpu_figures(device: torch.device) -> Figures:
    """What only a GPU has: a way to its host, memory that is taken before any tensor, messages that take of it."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    framework_bytes = total - free - torch.cuda.memory_reserved(device)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
    there = torch.empty_like(host, device=device)
    meter, products = Meter(device), transformer_products(device)
    us = meter.time_us(lambda: there.copy_(host, non_blocking=True))
    figures = {"framework_gib": framework_bytes / 2**30, "host_gb_per_s": _COPY_BYTES / us / 1e3}
    slowdown = meter.message_slowdown(lambda: products(1))
    return figures if slowdown is None else {**figures, "message_slowdown": slowdown}
