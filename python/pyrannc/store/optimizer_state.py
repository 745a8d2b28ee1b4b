"""The state that an optimizer keeps for each parameter: whose it is, where it lies, whether a saved one fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer

from pyrannc.capture.torch_internals.gradients import home_of_state
from pyrannc.errors import InputError
from pyrannc.store.param_lists import Listed


def placed(param: Tensor, state: Any, settings: Mapping[str, Any]) -> Any:
    """A parameter's state with every tensor where torch would put it; types stay.

    Args:
        settings: of the parameter's group.
    """
    return _placed(state, lambda value, key: value.to(home_of_state(param, value, key, settings)))


def on_own_device(settings: Any, device: torch.device) -> Any:
    """Settings that rank 0 has sent, with tensors of its device, such as a learning rate, on this rank's."""
    return _placed(settings, lambda value, key: value if value.device.type == "cpu" else value.to(device))


def _placed(item: Any, place: Callable[[Tensor, Any], Tensor], key: Any = None) -> Any:
    if isinstance(item, Tensor):
        return place(item, key)
    if isinstance(item, dict):
        made = [(name, _placed(value, place, name)) for name, value in item.items()]
        return type(item)(made) if type(item) is not dict else dict(made)
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
        return type(item)(_placed(value, place) for value in item)
    return item


def drop_state(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Forgets the state of parameters."""
    for param in params:
        optimizer.state.pop(param, None)


def put_state(optimizer: Optimizer, param: Tensor, state: Any) -> None:
    """Sets a parameter's state; a dict stays the same one, which a step that is under way may hold."""
    present = optimizer.state.get(param)
    if type(present) is dict and isinstance(state, dict):
        present.clear()
        present.update(state)
    else:
        optimizer.state[param] = state


def by_number(saved: Mapping[str, Any]) -> dict[int, Any]:
    """The state of parameters in a state dict, by their number; torch gives them any keys."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    return {number: saved["state"][key] for number, key in enumerate(keys) if key in saved["state"]}


def of_no_param(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """What else stands in the state of a state dict."""
    keys = {key for group in saved["param_groups"] for key in group["params"]}
    return {key: value for key, value in saved["state"].items() if key not in keys}


def refuse_misfit(saved: Any, optimizer: Optimizer, listed: Sequence[Listed], sizes: Sequence[int]) -> None:
    """Raises InputError unless a state dict is one of this optimizer, as far as that can be told.

    Args:
        listed: the parameters of all ranks.
        sizes: number of parameters of each group.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise InputError(
            "the state to load is not what optimizer.state_dict(from_global=True) gives: it lacks "
            '"state" or "param_groups"; on rank 0 pass the whole state dict'
        )
    found = [len(group["params"]) for group in saved["param_groups"]]
    if found != list(sizes):
        raise InputError(
            f"the state to load is that of an optimizer with {_of_groups(found)}, but this one has "
            f"{_of_groups(sizes)}; make the optimizer as it was when the state was saved with from_global=True"
        )
    state = by_number(saved)
    for item in listed:
        for key, value in _tensors(state.get(item.number)):
            known = _expected(optimizer, item, key)
            factors = isinstance(optimizer, Adafactor)
            if known is not None and value.shape != known and not (factors and _goes_into(value.shape, known)):
                raise InputError(
                    f'"{key}" of parameter {item.number} (group {item.group} of the optimizer) has shape '
                    f"{tuple(value.shape)} in the state to load, but the parameter has {tuple(item.param.shape)}; "
                    "it is the state of another model, or its parameters came in another order"
                )


def _of_groups(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} groups of {', '.join(map(str, sizes))} parameters"


def _tensors(state: Any) -> list[tuple[str, Tensor]]:
    """The tensors with extents of a parameter's state."""
    if not isinstance(state, Mapping):
        return []
    return [(str(key), value) for key, value in state.items() if isinstance(value, Tensor) and value.dim()]


def _expected(optimizer: Optimizer, item: Listed, key: str) -> torch.Size | None:
    """The shape that a value of a parameter's state goes into; None if that cannot be told."""
    if type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS):
        return item.param.shape
    present = optimizer.state.get(item.param)
    value = present.get(key) if isinstance(present, Mapping) else None
    if not isinstance(value, Tensor):
        return None
    return item.param.shape if item.parts and value.dim() else value.shape


def _goes_into(shape: torch.Size, known: torch.Size) -> bool:
    """True when a tensor can be spread over a known shape: factors have extents of 1."""
    return len(shape) == len(known) and all(mine in (1, its) for mine, its in zip(shape, known, strict=True))
