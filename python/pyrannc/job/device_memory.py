"""Memory of this process's device: what torch may take of it, and what is left of that."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from pyrannc._native import framework_bytes


@dataclass
class _Kept:
    """The share of a device that torch was held to, and that which the script had allowed it."""

    own: float
    allowed: float


_kept: dict[torch.device, _Kept] = {}


def keep_below(limit_bytes: int | None, device: torch.device) -> None:
    """Holds torch to a limit, less what CUDA and communicators take besides; ``None``: to what the script allows it.

    More than that raises torch's OutOfMemoryError, once torch has given back what it keeps unused.
    """
    if device.type != "cuda":
        return
    now = torch.cuda.get_per_process_memory_fraction(device)
    kept = _kept.get(device)
    allowed = kept.allowed if kept is not None and now == kept.own else now
    own = allowed
    if limit_bytes is not None:
        own = min(allowed, max(0, limit_bytes - framework_bytes) / _whole_bytes(device))
    if own != now:
        torch.cuda.set_per_process_memory_fraction(own, device)
        _kept[device] = _Kept(torch.cuda.get_per_process_memory_fraction(device), allowed)


def give_back(device: torch.device) -> None:
    """Gives memory that nothing uses back to the device.

    In a region of autocast torch keeps the conversions of all weights, and by them the weights, until the region ends:
    what a trial of the model in the script's region leaves would be there in the first step.
    """
    torch.clear_autocast_cache()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def collect(device: torch.device) -> None:
    """Gives back also what only objects that refer to each other still hold, which Python looks for now and then.

    Looking takes some tenths of a second: what lies on the host can wait.
    """
    if device.type == "cuda":
        gc.collect()
    give_back(device)


def left_bytes(device: torch.device) -> int:
    """What torch can still take of a GPU, besides what it keeps unused."""
    free, _ = torch.cuda.mem_get_info(device)
    allowed = torch.cuda.get_per_process_memory_fraction(device) * _whole_bytes(device)
    return max(0, min(free, int(allowed) - torch.cuda.memory_reserved(device)))


def _whole_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
