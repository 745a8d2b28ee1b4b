"""Whether an optimizer updates each element of a parameter by itself, so that ranks may update parts of parameters."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from pyrannc.capture.nodes.chance import torch_draws
from pyrannc.store.by_parameter import state_like, tried

_STEPS, _MOST_STEPS = 100, 1000
_EXTENT = 3
_SCALES = (1.0, 1e3, 1e-3)
"""What gradients are multiplied by, step by step: some optimizers do something else with large ones."""


def is_by_element(optimizer: Optimizer, device: torch.device) -> bool:
    """True when an optimizer may be given parts of parameters.

    An attribute ``by_element`` of the optimizer or its class decides, if there is one. Otherwise an optimizer of its
    class and settings is tried on small made-up parameters, whole and in two parts, beyond the steps that its settings
    may name, from which on some do something else.

    Args:
        device: where this rank computes.
    """
    stated = getattr(optimizer, "by_element", None)
    if stated is not None:
        return bool(stated)
    steps = _steps(optimizer)
    if steps > _MOST_STEPS:
        return False
    # Some make the state of their parameters at once, and need it.
    for with_state in (False, True):
        try:
            whole, parts = (_updated(optimizer, device, steps, in_parts, with_state) for in_parts in (False, True))
        except Exception:  # what cannot be tried is updated whole
            continue
        # The same operators may round otherwise at the end of a part.
        return torch.allclose(whole, parts, rtol=1e-9, atol=1e-12, equal_nan=True)
    return False


def _steps(optimizer: Optimizer) -> int:
    """Some more than any integer among the settings."""
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    named = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    return max([_STEPS, *(value + _STEPS for value in named)])


def _updated(optimizer: Optimizer, device: torch.device, steps: int, in_parts: bool, with_state: bool) -> Tensor:
    """Made-up parameters of all numbers of dimensions after some steps, one behind the other."""
    generator = Generator().manual_seed(0)
    trial = tried(optimizer)
    made: list[Tensor] = []
    for group, own in zip(optimizer.param_groups, trial.param_groups, strict=True):
        for like in {param.dim(): param for param in group["params"]}.values():
            data = torch.randn([_EXTENT] * like.dim(), generator=generator, dtype=torch.float64, device="cpu")
            for part in data.flatten().tensor_split(2) if in_parts and like.dim() else [data]:
                own["params"].append(nn.Parameter(part.to(device, copy=True)))
                if with_state:
                    trial.state[own["params"][-1]] = state_like(optimizer, like, part, part.dtype)
        made += own["params"]
    with torch_draws(0, device):
        for step in range(steps):
            sizes = [param.numel() for param in made]
            grads = (
                torch.randn(sum(sizes), generator=generator, dtype=torch.float64, device="cpu")
                * _SCALES[step % len(_SCALES)]
            )
            for param, grad in zip(made, torch.split(grads, sizes), strict=True):
                param.grad = grad.view_as(param).to(device, copy=True)
            trial.step()
    return torch.cat([param.detach().flatten() for param in made]) if made else torch.zeros(0, device="cpu")
