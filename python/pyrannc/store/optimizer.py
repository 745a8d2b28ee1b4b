"""The user's optimizer, narrowed to the parameters of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pyrannc.job import agree, process
from pyrannc.job.faults import collective


class NarrowedOptimizer:
    """Keeps class and param groups of an optimizer, but lists only this rank's parameters.

    ``state_dict`` and ``load_state_dict`` of the optimizer get an argument ``from_global``: the state of
    all parameters, in the original order, on rank 0.

    Args:
        optimizer: the user's.
        names: first name of each parameter of the model, by identity.
        local: true for names of parameters that this rank holds.
        owned: true for names of parameters whose state this rank gives to rank 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[int, str],
        local: Callable[[str], bool],
        owned: Callable[[str], bool],
    ) -> None:
        self.optimizer = optimizer
        self._local = local
        self._owned = owned
        self._original = [list(group["params"]) for group in optimizer.param_groups]
        self._names = [[names.get(id(param), "") for param in group] for group in self._original]
        for group, params, found in zip(optimizer.param_groups, self._original, self._names, strict=True):
            group["params"] = [param for param, name in zip(params, found, strict=True) if local(name)]
        self._move_state()
        self._local_state_dict = optimizer.state_dict
        self._local_load_state_dict = optimizer.load_state_dict
        optimizer.state_dict = self._state_dict  # type: ignore[method-assign]  # the contract adds an argument
        optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]  # likewise

    def _move_state(self) -> None:
        """State follows its parameter to the device; state of other ranks' parameters is dropped."""
        state = self.optimizer.state
        kept = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        for param in [param for param in state if id(param) not in kept]:
            del state[param]
        for param, values in state.items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == param.shape:
                    values[key] = value.to(param.device)

    def _state_dict(self, from_global: bool = False) -> dict[str, Any]:
        """The optimizer's state.

        Args:
            from_global: the state of all ranks' parameters, with the original numbering, on rank 0 and an
                empty dict elsewhere. All ranks call it.
        """
        if not from_global:
            return self._local_state_dict()
        with collective("optimizer.state_dict(from_global=True)"):
            return self._global_state_dict()

    def _global_state_dict(self) -> dict[str, Any]:
        everyone = agree.gather_objects(self._owned_state())
        if process.get_rank() != 0:
            return {}
        merged: dict[int, Any] = {index: state for part in everyone for index, state in part.items()}
        groups = []
        start = 0
        for group, params in zip(self.optimizer.param_groups, self._original, strict=True):
            settings = {key: value for key, value in group.items() if key != "params"}
            groups.append({**settings, "params": list(range(start, start + len(params)))})
            start += len(params)
        return {"state": dict(sorted(merged.items())), "param_groups": groups}

    def _owned_state(self) -> dict[int, Any]:
        found = {}
        for index, (param, name) in enumerate(self._numbered()):
            if self._owned(name) and param in self.optimizer.state:
                values = self.optimizer.state[param]
                found[index] = {key: v.cpu() if isinstance(v, Tensor) else v for key, v in values.items()}
        return found

    def _numbered(self) -> list[tuple[nn.Parameter, str]]:
        pairs = zip(self._original, self._names, strict=True)
        return [pair for params, names in pairs for pair in zip(params, names, strict=True)]

    def _load_state_dict(self, state_dict: dict[str, Any], from_global: bool = False) -> None:
        """Takes back what ``state_dict`` gave.

        Args:
            state_dict: with ``from_global``, only rank 0's counts; all ranks call it.
            from_global: the state is that of all parameters, in the original numbering.
        """
        if not from_global:
            self._local_load_state_dict(state_dict)
            return
        with collective("optimizer.load_state_dict(..., from_global=True)"):
            self._load_global_state_dict(state_dict)

    def _load_global_state_dict(self, state_dict: dict[str, Any]) -> None:
        whole = agree.broadcast_object(state_dict)
        # What fits the parameters of one rank may not fit those of another.
        agree.together(lambda: self._load_part_of(whole))

    def _load_part_of(self, whole: dict[str, Any]) -> None:
        numbers = [index for index, (_, name) in enumerate(self._numbered()) if self._local(name)]
        renumbered = {old: new for new, old in enumerate(numbers)}
        state = {renumbered[old]: values for old, values in whole["state"].items() if old in renumbered}
        groups = [
            {**group, "params": [renumbered[old] for old in group["params"] if old in renumbered]}
            for group in whole["param_groups"]
        ]
        self._local_load_state_dict({"state": state, "param_groups": groups})

    def widen(self) -> None:
        """Gives the optimizer its parameters back, with the state of all ranks. All ranks call it."""
        whole = agree.broadcast_object(self._global_state_dict())
        for group, params in zip(self.optimizer.param_groups, self._original, strict=True):
            group["params"] = params
        del self.optimizer.state_dict, self.optimizer.load_state_dict
        self.optimizer.load_state_dict(whole)
