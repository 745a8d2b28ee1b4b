"""Finds parameters of a deployed model in an optimizer that was not given to it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from pyrannc.errors import RaNNCError
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.store import ParamStore

_deployed: list[tuple[weakref.ref[ParamStore], weakref.ref[UserOptimizer] | None]] = []


def note_deployed(store: ParamStore, optimizer: UserOptimizer | None) -> None:
    """A model is deployed, and its optimizer is going to be narrowed.

    Raises:
        RaNNCError: the optimizer of another deployed model lists parameters of this one, or the other way round.
    """
    for known, other in [(known(), None if own is None else own()) for known, own in _deployed]:
        if known is not None and other is not optimizer:
            _refuse(store.params.values(), [] if other is None else other.everywhere())
            _refuse(known.params.values(), [] if optimizer is None else optimizer.all())
    _deployed.append((weakref.ref(store), None if optimizer is None else weakref.ref(optimizer)))


def note_taken_back(store: ParamStore) -> None:
    """A model is deployed no longer."""
    _deployed[:] = [(known, own) for known, own in _deployed if known() not in (None, store)]


def _refuse(params: Iterable[Tensor], listed: Iterable[Tensor]) -> None:
    ids = set(map(id, params))
    if any(id(param) in ids for param in listed):
        raise RaNNCError(
            "an optimizer that was given to one RaNNCModule lists parameters of another one, which some ranks do not "
            "hold; give it to both: RaNNCModule(first, optimizer) and RaNNCModule(second, optimizer)"
        )
