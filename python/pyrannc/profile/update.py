"""What a step does with every gradient besides computing and summing it: update its parameter."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pyrannc.log import get_logger
from pyrannc.profile.meter import Meter

_log = get_logger("DPStaging")

_PARAMS = 16
_GPU_NUMEL = 1 << 22
"""Of a parameter: that of a layer of some thousand features."""
_HOST_NUMEL = 1 << 16


@dataclass(frozen=True)
class UpdatePoint:
    """The end of a step: the core's ``MeasuredUpdate``.

    Attributes:
        params_bytes: of trainable parameters.
        update_us: time for them.
    """

    params_bytes: int
    update_us: float


def measure_update(optimizer: Optimizer | None, device: torch.device, *, replayed: bool = False) -> UpdatePoint | None:
    """Measures an optimizer of the same class and settings on made-up parameters; the given one is left alone.

    Args:
        optimizer: the user's.
        device: of its parameters.
        replayed: steps are replayed as CUDA graphs, so that the host comes to it long before the device does.

    Returns:
        None without an optimizer, and when such an optimizer cannot be made or run.
    """
    group = _group(optimizer)
    if optimizer is None or group is None:
        return None
    try:
        return _measure(optimizer, group, device, replayed=replayed)
    except Exception as error:
        _log.warning("the optimizer's time is estimated, because it cannot be measured: %s", error)
        return None
    finally:
        Meter(device).release()


def describe(optimizer: Optimizer | None) -> str:
    """What the time of an optimizer depends on."""
    group = _group(optimizer)
    if group is None:
        return ""
    switches = {name: setting for name, setting in group.items() if setting is None or isinstance(setting, bool)}
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {_dtype(group)} {sorted(switches.items())}"


def _group(optimizer: Optimizer | None) -> dict[str, Any] | None:
    """The first of its groups that has parameters."""
    groups = [] if optimizer is None else optimizer.param_groups
    return next((group for group in groups if group["params"]), None)


def _dtype(group: dict[str, Any]) -> torch.dtype:
    found: torch.dtype = group["params"][0].dtype
    return found


def _measure(optimizer: Optimizer, group: dict[str, Any], device: torch.device, *, replayed: bool) -> UpdatePoint:
    dtype, meter = _dtype(group), Meter(device)
    numel = _GPU_NUMEL if meter.on_gpu else _HOST_NUMEL
    # Numbers are drawn: with gradients of zero, Adam's roots and divisions take a GPU a quarter longer.
    draw = partial(torch.randn, numel, device=device, generator=torch.Generator(device).manual_seed(0))
    params = [nn.Parameter(draw().to(dtype)) for _ in range(_PARAMS)]
    own = copy.copy(optimizer)
    own.state = defaultdict(dict)
    own.param_groups = [{**group, "params": params}]

    for param in params:
        param.grad = draw().to(dtype)
    device_us = meter.time_us(own.step)
    host_us = meter.host_us([own.step] * 3) if meter.on_gpu and not replayed else 0.0
    return UpdatePoint(_PARAMS * numel * dtype.itemsize, max(device_us, host_us))
