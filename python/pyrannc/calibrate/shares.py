"""``python -m pyrannc calibrate``: what this machine's devices and links can do, as a cluster file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pyrannc._native import Cluster
from pyrannc.calibrate.action_cost import measure_action_us
from pyrannc.calibrate.workloads import Workload, Workloads
from pyrannc.config import Config
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.planning import find_cluster, own_device
from pyrannc.profile.cache import write_atomically
from pyrannc.profile.links import LevelPoint, measure_collective_slowdown, measure_links
from pyrannc.profile.measure import is_out_of_memory
from pyrannc.profile.meter import Meter
from pyrannc.profile.progress import Bar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DESCRIPTION = "Measures how fast this machine computes and communicates, and writes it as a cluster file."
_EPILOG = """\
Examples:
  python -m pyrannc calibrate -o cluster.toml
  torchrun --nproc-per-node 8 -m pyrannc calibrate -o cluster.toml    # links between the 8 devices, too

Then plan with these figures: `rannc plan GRAPH --cluster cluster.toml`, or train with RANNC_CLUSTER_FILE=cluster.toml.
"""

_LONGEST_US = {"cuda": 1e5, "cpu": 1e4}
"""An op that takes longer than this is large enough: no larger one of its kind is tried."""
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32, "half": torch.bfloat16}
_KINDS = ("matrix", "convolution", "attention")
_TINY_SERIES = 5
_MOVERS = ("pointwise", "normalisation", "embedding", "optimizer")
_COPY_BYTES = 1 << 28

Point = tuple[float, float]
"""Work, and work a second."""
Figures = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Runs ``calibrate`` with the arguments after that word and returns the exit status. All ranks call it."""
    arguments = _parser().parse_args(argv)
    try:
        device = process.ensure_process_group().device
        agree.together(lambda: _check_folder(arguments.output) if process.get_rank() == 0 else None)
        ranks = agree.gather_objects(own_device(device))
        cluster = find_cluster(Config(), ranks)
        names = [rank.name for rank in ranks]
        measured = agree.together(lambda: _measure_if_first(names, device))
        found = {name: figures for name, figures in agree.gather_objects(measured) if figures}
        common: Figures = {"action_us": agree.gather_objects(measure_action_us(device))[0]}
        links: list[LevelPoint] = []
        if len(ranks) > 1:
            links = measure_links([rank.host for rank in ranks], cluster.level_names, device)
            slowdown = measure_collective_slowdown(device)
            common |= {} if slowdown is None else {"collective_slowdown": slowdown}
        text = calibrated(cluster, {name: {**figures, **common} for name, figures in found.items()}, links)
        agree.together(lambda: _write(arguments.output, text) if process.get_rank() == 0 else None)
    except RaNNCError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        process.clear()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pyrannc calibrate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, help="the cluster file; without it, it is printed")
    return parser


def _check_folder(path: Path | None) -> None:
    """Nobody waits for figures that cannot be kept."""
    if path is not None and not path.parent.is_dir():
        raise RaNNCError(f"cannot write {path}: there is no folder {path.parent}")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        print(text, end="")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise RaNNCError(f"cannot write {path}: {error}") from error
    print(f"wrote {path}", file=sys.stderr)


def _measure_if_first(names: Sequence[str], device: torch.device) -> tuple[str, Figures]:
    """The figures of this rank's device, if no rank before has the same kind."""
    rank = process.get_rank()
    return names[rank], measure_device(device) if names.index(names[rank]) == rank else {}


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


def _speeds(meter: Meter, workloads: Iterable[Workload], longest_us: float) -> list[Point]:
    """Work a second for works of increasing size, as far as memory and patience go."""
    points: list[Point] = []
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


def _shares(speeds: Sequence[Point], peak: float) -> list[list[float]]:
    """Shares of a peak by work; those by which more work would be done sooner are left out."""
    kept: list[list[float]] = []
    for work, speed in speeds:
        if not kept or work / (speed / peak) > kept[-1][0] / kept[-1][1]:
            kept.append([work, speed / peak])
    return kept


def _gpu_figures(device: torch.device) -> Figures:
    """What only a GPU has: a way to its host's memory, and memory that is taken before any tensor."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    framework_bytes = total - free - torch.cuda.memory_reserved(device)
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    us = Meter(device).time_us(lambda: there.copy_(host, non_blocking=True))
    return {"framework_gib": framework_bytes / 2**30, "host_gb_per_s": _COPY_BYTES / us / 1e3}


def calibrated(cluster: Cluster, devices: Mapping[str, Figures], links: Sequence[LevelPoint]) -> str:
    """The text of a cluster file.

    Args:
        cluster: what is kept where nothing was measured.
        devices: measured fields by name of the device.
        links: measured levels.
    """
    table = tomllib.loads(cluster.to_toml())
    for device in table["device"].values():
        device.update(devices[device["name"]])
    measured = {level.name: level for level in links}
    for level in table["level"]:
        if level["name"] in measured:
            send, collective = measured[level["name"]].send, measured[level["name"]].collective
            level["latency_us"], level["gb_per_s"] = send.latency_us, send.bytes_per_s / 1e9
            level["collective_latency_us"] = collective.latency_us
            level["collective_gb_per_s"] = collective.bytes_per_s / 1e9
    lines = [f"name = {json.dumps(table['name'])}"]
    for key, device in table["device"].items():
        lines += [f"[device.{key}]", *_fields(device)]
    for section in ("node", "level"):
        for entry in table[section]:
            lines += [f"[[{section}]]", *_fields(entry)]
    return Cluster.from_toml("\n".join(lines)).to_toml()


def _fields(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The lines of a table; JSON writes its values as TOML does."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"
