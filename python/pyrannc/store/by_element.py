"""Whether an optimizer updates each element of a parameter by itself, so that ranks may update parts of parameters."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from pyrannc.store.by_parameter import tried

_STEPS = 3
_EXTENT = 3


def is_by_element(optimizer: Optimizer, device: torch.device) -> bool:
    """True when an optimizer may be given parts of parameters.

    An attribute ``by_element`` of the optimizer or its class decides, if there is one. Otherwise an optimizer of its
    class and settings is tried on small made-up parameters, whole and in two parts.

    Args:
        device: where this rank computes.
    """
    stated = getattr(optimizer, "by_element", None)
    if stated is not None:
        return bool(stated)
    try:
        whole, parts = _updated(optimizer, device, in_parts=False), _updated(optimizer, device, in_parts=True)
    except Exception:  # what cannot be tried is updated whole
        return False
    # The same operators may round otherwise at the end of a part.
    return torch.allclose(whole, parts, rtol=1e-9, atol=1e-12, equal_nan=True)


def _updated(optimizer: Optimizer, device: torch.device, *, in_parts: bool) -> Tensor:
    """Made-up parameters after some steps, one behind the other."""
    generator = Generator().manual_seed(0)
    trial = tried(optimizer)
    made: list[Tensor] = []
    for group, own in zip(optimizer.param_groups, trial.param_groups, strict=True):
        for dims in sorted({param.dim() for param in group["params"]}):
            data = torch.randn([_EXTENT] * dims, generator=generator, dtype=torch.float64)
            own["params"] += [nn.Parameter(part.to(device, copy=True)) for part in _divided(data, in_parts=in_parts)]
        made += own["params"]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for _ in range(_STEPS):
            sizes = [param.numel() for param in made]
            grads = torch.randn(sum(sizes), generator=generator, dtype=torch.float64)
            for param, grad in zip(made, torch.split(grads, sizes), strict=True):
                param.grad = grad.view_as(param).to(device, copy=True)
            trial.step()
    return torch.cat([param.detach().flatten() for param in made]) if made else torch.zeros(0)


def _divided(data: Tensor, *, in_parts: bool) -> list[Tensor]:
    if not in_parts or data.numel() < 2:
        return [data]
    return list(data.flatten().tensor_split(2))
