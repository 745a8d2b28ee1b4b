"""Full state dicts: gathered from, and given back to, the ranks that hold the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.job import agree, process
from pyrannc.store.store import ParamStore


def full_state_dict(model: nn.Module, store: ParamStore, *, rank0_only: bool, **kwargs: Any) -> dict[str, Any]:
    """The model's state dict with the tensors of their owners, on the host. All ranks call it.

    Args:
        rank0_only: only rank 0 gets it; the others get an empty dict.
    """
    template: dict[str, Any] = model.state_dict(**kwargs)
    wanted = process.get_rank() == 0 or not rank0_only
    gathered = {}
    for name, tensor in store.tensors():
        full = store.full(name, tensor.detach())
        if wanted:
            gathered[id(tensor)] = full
    if not wanted:
        return {}
    prefix = kwargs.get("prefix", "")
    for name, tensor in _every_name(model):
        if prefix + name in template:
            template[prefix + name] = gathered[id(tensor)]
    return template


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Loads rank 0's state dict into the parts that each rank holds. All ranks call it.

    Returns:
        What ``torch.nn.Module.load_state_dict`` returns.

    Raises:
        RuntimeError: keys or shapes do not fit, as torch says it.
    """
    whole = agree.broadcast_object(dict(state_dict) if process.get_rank() == 0 else None)
    # copy_() inside keeps every tensor on the device where the Plan put it.
    return model.load_state_dict(whole, *args, **kwargs)


def _every_name(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
