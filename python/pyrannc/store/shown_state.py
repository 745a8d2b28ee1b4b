"""The optimizer's state of parameters that Replicas update in parts, as scripts find it between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from pyrannc.errors import RaNNCError
from pyrannc.store.buckets import elements_by
from pyrannc.store.no_state import NoState
from pyrannc.store.spread_tensor import is_spread, own_piece, spread_state


@dataclass(frozen=True)
class StateForm:
    """Where this rank's part of a parameter's state belongs.

    Attributes:
        name: first name of the parameter.
        ranks: that have the parts.
        size: of the parameter.
        strides: of its elements in memory.
        start: place of the part's first element among them.
        end: behind its last one.
    """

    name: str
    ranks: tuple[int, ...]
    size: torch.Size
    strides: tuple[int, ...]
    start: int
    end: int

    def is_part(self, value: Any) -> bool:
        """True for a tensor of the part's elements."""
        return isinstance(value, Tensor) and value.shape == (self.end - self.start,)

    def shown(self, value: Any) -> Any:
        """What stands for a value: a tensor of the part's elements is shown as one of the parameter's form."""
        if not self.is_part(value):
            return value
        return spread_state(self.size, self.strides, self.name, self.ranks, value, self.start)

    def kept(self, value: Any) -> Any:
        """Of a value that a script sets what this rank keeps."""
        if not isinstance(value, Tensor):
            return value
        if is_spread(value):
            return own_piece(value)
        if value.shape != self.size:
            return value
        return elements_by(self.strides, value.detach(), self.start, self.end).clone()


if TYPE_CHECKING:
    _Dict = dict[Any, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict, which scripts ask for, of which all methods go by the few that a mapping must have."""

        __slots__ = ()


class ShownState(_Dict):
    """The state of one parameter; its tensors refuse what would need the whole.

    Args:
        kept: what the optimizer works with.
        form: of the parameter; without one, as where a library makes one of another, the contents are a script's.
    """

    __slots__ = ("form", "kept")

    def __init__(self, kept: MutableMapping[Any, Any], form: StateForm | None = None) -> None:
        self.kept = kept
        self.form = form

    def __getitem__(self, key: Any) -> Any:
        return self.kept[key] if self.form is None else self.form.shown(self.kept[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        # What a script adds for itself stays whole.
        is_divided = self.form is not None and (is_spread(value) or self.form.is_part(self.kept.get(key)))
        self.kept[key] = self.form.kept(value) if self.form is not None and is_divided else value

    def __delitem__(self, key: Any) -> None:
        del self.kept[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.kept)

    def __len__(self) -> int:
        return len(self.kept)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __or__(self, other: Any) -> dict[Any, Any]:
        return {**self, **other}

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return {**other, **self}

    def __ior__(self, other: Any) -> ShownState:
        self.update(other)
        return self

    def copy(self) -> dict[Any, Any]:
        """What is shown, as a plain dict."""
        return dict(self)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> ShownState:
        return ShownState(deepcopy(self.kept, memo), self.form)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RaNNCError(
            "the optimizer's state is divided among ranks, so it cannot be pickled, as torch.save(optimizer) does: "
            "save optimizer.state_dict(from_global=True), which all ranks call"
        )


def shown_state(state: Any, form: StateForm | None) -> Any:
    """What a script finds.

    Args:
        form: None where what is kept is the whole.
    """
    return ShownState(state, form) if form is not None and isinstance(state, dict) else state


def kept_state(state: Any, form: StateForm | None = None) -> Any:
    """What the optimizer works with, of what a script has found, or, given the form, has set."""
    if isinstance(state, ShownState) and (form is None or state.form is not None):
        if form is not None and state.form != form:
            raise RaNNCError(
                f'optimizer.state has for parameter "{form.name}" what was taken from it before the model was deployed '
                "anew, when it was divided otherwise among ranks: keep optimizer.state_dict(from_global=True) instead, "
                "which all ranks call, and bring it back by optimizer.load_state_dict(state, from_global=True)"
            )
        return state.kept
    if type(state) is NoState:
        return dict(state)
    if form is None or not isinstance(state, Mapping):
        return state
    return {key: form.kept(value) for key, value in state.items()}
