"""An optimizer lists the parameters of all ranks, and works with what this rank updates of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pyrannc.capture.torch_internals.gradients import call_first_after_steps, frame_of_step, kept_uncompiled
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.job.faults import collective
from pyrannc.store.course import course_of
from pyrannc.store.divided import DividedParams, Piece, Works
from pyrannc.store.no_state import forget_missing, tell_of_missing
from pyrannc.store.shown_state import kept_state, shown_state
from pyrannc.store.spread_tensor import Spread

_KEYS = ("params", "param_names")
_NOTHING = object()

Divided: TypeAlias = Callable[[], Sequence[DividedParams]]


@dataclass
class _Hidden:
    """What an optimizer lists otherwise: by group, all of it and what has been put in its place.

    Attributes:
        step: the call of ``step`` that it is for, as :func:`_mark` tells; None: it is for no step.
    """

    step: Any = None
    groups: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)


_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
_shared: WeakSet[Optimizer] = WeakSet()
_divided: WeakKeyDictionary[Optimizer, WeakMethod[Divided]] = WeakKeyDictionary()
_hidden: WeakKeyDictionary[Optimizer, _Hidden] = WeakKeyDictionary()


@contextmanager
def own_listed(optimizer: Optimizer) -> Iterator[None]:
    """Lists only what this rank holds, inside."""
    end_failed_step(optimizer)
    if optimizer in _hidden:
        yield
        return
    _hide(optimizer, _works_of(optimizer, ()))
    try:
        yield
    finally:
        _show(optimizer)


def all_listed(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer lists outside of its steps."""
    hidden = _hidden.get(optimizer)
    whole = {} if hidden is None else {id(group): listed["params"] for group, listed, _ in hidden.groups}
    return [param for group in optimizer.param_groups for param in whole.get(id(group), group["params"])]


def end_failed_step(optimizer: Optimizer) -> None:
    """Lists all parameters again if a step has failed since: nobody is told of that."""
    hidden = _hidden.get(optimizer)
    if hidden is not None and hidden.step is not None and not _runs(hidden.step):
        _show(optimizer)


def _runs(step: Any) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _mark(frame) != step:
        frame = frame.f_back
    return frame is not None


def _mark(frame: FrameType) -> Any:
    """Tells a call from others that run, without keeping what it holds."""
    return id(frame), frame.f_code


def step_with_own(optimizer: Optimizer, divided: Divided) -> None:
    """From now on steps work with what this rank updates.

    Args:
        divided: a method that tells which parameters the optimizer updates in parts; what the other ranks have updated
            is here after each step.
    """
    _divided[optimizer] = WeakMethod(divided)
    if optimizer not in _hooks:
        _hooks[optimizer] = optimizer.register_step_pre_hook(_before)


def steps_of(optimizer: Optimizer) -> int:
    """How often an optimizer has stepped since other ranks may hold what it lists."""
    return course_of(optimizer).steps


def note_clear(optimizer: Optimizer) -> None:
    """Gradients of what it lists are cleared."""
    if optimizer in _shared:
        course_of(optimizer).clear()


def begin_sharing(optimizer: Optimizer) -> None:
    """From now on other ranks may hold what the optimizer lists."""
    if optimizer not in _shared:
        # The script's own hooks find all parameters, and these as they are after the step.
        call_first_after_steps(optimizer, _after)
        _shared.add(optimizer)


def hide_last(optimizer: Optimizer) -> None:
    """Lets the script's own hooks, which run before a step that begins, find all parameters."""
    if optimizer in _hooks:
        _hooks[optimizer].remove()
        _hooks[optimizer] = optimizer.register_step_pre_hook(_before)


@kept_uncompiled
def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    # A step that failed has left it so.
    _show(optimizer)
    step = _mark(frame_of_step())
    if optimizer in _shared:
        works = _works_of(optimizer, _divided_by(optimizer))
        _refuse_parts(optimizer, works)
        course_of(optimizer).begin_step(optimizer.param_groups)
        _hide(optimizer, works, step)
    closures = [item for item in (*args[1:], *kwargs.values()) if callable(item)]
    if not closures:
        return None
    whole = {id(closure): _with_all_listed(optimizer, closure, step) for closure in closures}
    return (
        tuple(whole.get(id(item), item) for item in args),
        {name: whole.get(id(item), item) for name, item in kwargs.items()},
    )


def _with_all_listed(optimizer: Optimizer, closure: Callable[[], Any], step: Any) -> Callable[[], Any]:
    """The script's closure, which finds all parameters listed; they stay so where it fails, and the step with it."""

    def call() -> Any:
        _show(optimizer)
        result = closure()
        if optimizer in _shared:
            _hide(optimizer, _works_of(optimizer, _divided_by(optimizer)), step)
        return result

    return call


@kept_uncompiled
def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _show(optimizer)
    course_of(optimizer).end_step(optimizer.param_groups)
    divided = _divided_by(optimizer)
    if divided:
        with collective("optimizer.step()"):
            for params in divided:
                params.gather()


def _divided_by(optimizer: Optimizer) -> Sequence[DividedParams]:
    method = _divided[optimizer]() if optimizer in _divided else None
    return () if method is None else method()


def _works_of(optimizer: Optimizer, divided: Sequence[DividedParams]) -> list[Works]:
    """By group, what is updated here, in pieces where parameters are divided."""
    groups = [group["params"] for group in optimizer.param_groups]
    if len(divided) == 1:
        return divided[0].works(groups)
    pieces = {key: piece for params in divided for key, piece in params.pieces.items()}
    return [Works.of(params, pieces) for params in groups]


def _hide(optimizer: Optimizer, found: Sequence[Works], step: Any = None) -> None:
    hidden = _hidden[optimizer] = _Hidden(step)
    for group, works in zip(optimizer.param_groups, found, strict=True):
        if works.are_all:
            continue
        all_of_them = {key: group[key] for key in _KEYS if key in group}
        group.update({key: [listed[place] for place in works.places] for key, listed in all_of_them.items()})
        group["params"] = list(works.tensors)
        hidden.groups.append((group, all_of_them, group["params"]))
        hidden.pieces += works.pieces
    for piece in hidden.pieces:
        piece.come_home()
    # What classes of tensors would say takes time for each.
    with DisableTorchFunctionSubclass():
        for piece in hidden.pieces:
            piece.take_gradient()
    forget_missing(optimizer.state)
    _give_state(optimizer, hidden.pieces)


def _show(optimizer: Optimizer) -> None:
    hidden = _hidden.pop(optimizer, None)
    if hidden is None:
        return
    for group, all_of_them, own in hidden.groups:
        # Otherwise it was the script's will to list others.
        if group["params"] is own:
            group.update(all_of_them)
    for piece in hidden.pieces:
        piece.drop_gradient()
    _take_state(optimizer, hidden.pieces)
    if hidden.groups:
        tell_of_missing(optimizer.state)


def _refuse_parts(optimizer: Optimizer, found: Sequence[Works]) -> None:
    """Raises RaNNCError where an optimizer lists what another one updates in parts."""
    for works in found:
        if works.parts_of_others is not None:
            assert isinstance(works.parts_of_others, Spread), "another optimizer has pieces of it"
            works.parts_of_others.home.refuse(f"{type(optimizer).__name__}, which was not given to RaNNCModule,")


def _give_state(optimizer: Optimizer, pieces: Sequence[Piece]) -> None:
    """State is listed under the parameter, but kept by an optimizer under what it works with."""
    state = optimizer.state
    for piece in pieces:
        moved = _NOTHING if piece.tensor is None else state.pop(piece.param, _NOTHING)
        if piece.tensor is not None and moved is not _NOTHING:
            state[piece.tensor] = kept_state(moved, piece.form)


def _take_state(optimizer: Optimizer, pieces: Sequence[Piece]) -> None:
    state = optimizer.state
    for piece in pieces:
        moved = _NOTHING if piece.tensor is None else state.pop(piece.tensor, _NOTHING)
        if moved is not _NOTHING:
            state[piece.param] = shown_state(moved, piece.form)


def show_state(optimizer: Optimizer, divided: Sequence[DividedParams]) -> None:
    """Outside of steps: shows what has been put under parameters, whoever did, as scripts find it."""
    state = optimizer.state
    for piece in [piece for params in divided for piece in params.pieces.values()]:
        if piece.param in state:
            state[piece.param] = shown_state(kept_state(state[piece.param], piece.form), piece.form)
