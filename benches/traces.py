"""What a profiler's trace tells of a device."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Event = dict[str, Any]

_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def traced(step: Callable[[], object], steps: int, device: torch.device) -> list[Event]:
    """The events of some steps on this rank."""
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
        return events


def pauses_us(events: Sequence[Event], *, but: str = "") -> tuple[float, list[float]]:
    """From the first kernel or copy to the end of the last: how long that is, and the pauses between them.

    Args:
        but: kernels with this in their names are no work.
    """
    work = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in _WORK and not (but and but in event["name"])
    )
    if not work:
        return 0.0, []
    pauses = []
    end = work[0][0]
    for start, stop in work:
        pauses.append(max(0.0, start - end))
        end = max(end, stop)
    return end - work[0][0], pauses


def messages(events: Sequence[Event]) -> list[Event]:
    """The kernels of NCCL, each kind in its order, which is that of all ranks that send each other the same."""
    found = (event for event in events if event.get("cat") == "kernel" and "nccl" in event["name"])
    return sorted(found, key=lambda event: (event["name"], event["ts"]))


def without_waits(events: Sequence[Event], least_us: Sequence[float]) -> list[Event]:
    """The events, of which messages begin when all ranks have come.

    Args:
        least_us: of each message, how long it took on the rank that came last.
    """
    shortened = {
        id(event): {**event, "ts": event["ts"] + event["dur"] - us, "dur": us}
        for event, us in zip(messages(events), least_us, strict=True)
    }
    return [shortened.get(id(event), event) for event in events]


def kernels_us(events: Sequence[Event]) -> float:
    """How long all kernels but those of NCCL take together."""
    return sum(event["dur"] for event in events if event.get("cat") == "kernel" and "nccl" not in event["name"])


def replays(events: Sequence[Event]) -> list[list[Event]]:
    """What each replay of a CUDA graph has run on the device."""
    launches = {
        event["args"]["correlation"] for event in events if event.get("name") in ("cudaGraphLaunch", "cuGraphLaunch")
    }
    found: dict[int, list[Event]] = {launch: [] for launch in launches}
    for event in events:
        launch = event.get("args", {}).get("correlation")
        if event.get("cat") in _WORK and launch in launches:
            found[launch].append(event)
    return [replay for replay in found.values() if replay]
