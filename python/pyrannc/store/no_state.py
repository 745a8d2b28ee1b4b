"""What scripts find of the optimizer's state of a parameter for which this rank keeps none."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NoReturn

from pyrannc.errors import RaNNCError
from pyrannc.job import process


class NoStateError(RaNNCError, KeyError):
    """This rank keeps no such state."""

    __str__ = Exception.__str__


class NoState(dict[Any, Any]):
    """Empty, as what an optimizer's state has at first."""

    def __missing__(self, key: Any) -> NoReturn:
        raise NoStateError(
            f'rank {process.get_rank()} has no "{key}" of this parameter in optimizer.state: each rank keeps the state '
            "of what it updates itself. Change it where it is (if param in optimizer.state: ...), or take it by "
            "optimizer.state_dict(from_global=True), which all ranks call and which gives rank 0 the whole, and bring "
            "it back by optimizer.load_state_dict(state, from_global=True)"
        )


def tell_of_missing(state: Any) -> None:
    """Outside of steps, where other ranks keep some: what is asked for, and not there, is a :class:`NoState`."""
    if type(state) is defaultdict and state.default_factory is dict:
        state.default_factory = NoState


def forget_missing(state: Any) -> None:
    """Before a step: the state is as torch has it."""
    if type(state) is not defaultdict or state.default_factory is not NoState:
        return
    state.default_factory = dict
    for key in [key for key, value in state.items() if type(value) is NoState]:
        asked = state.pop(key)
        if asked:
            state[key] = dict(asked)
