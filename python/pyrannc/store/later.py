"""Optimizers that a script makes of a deployed model's parameters, or has not given to the module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyrannc.capture.torch_internals.gradients import graph_task, kept_uncompiled
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.job.faults import collective
from pyrannc.store.by_parameter import leaves_all_to_inner, refuse_later_across, refuse_sparse, with_inner
from pyrannc.store.course import Course, course_of
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.own_listed import hide_last
from pyrannc.store.store import ParamStore
from pyrannc.store.unscale import refuse_unsummed, watch_pending

_watching: weakref.WeakSet[LaterOptimizers] = weakref.WeakSet()
_looking = False
"""What steps meanwhile is being tried."""
_FEW = 8
"""So many optimizers are kept in mind whether they are still there or not."""


@dataclass(frozen=True)
class _Narrowed:
    """An optimizer that has stepped, on all ranks.

    Attributes:
        found: the optimizer keeps it alive.
        course: its own.
        cleared_with_model: it has parameters of the model alone.
    """

    found: weakref.ref[UserOptimizer]
    course: Course
    cleared_with_model: bool


class LaterOptimizers:
    """Narrows such optimizers to this rank's parameters when they step first, which they do on all ranks.

    Args:
        store: of the deployed model.
        known: the optimizer that is narrowed already.
        stages: of the Plan.
        see_other: is given those that have no parameters of a wrapped model.
        watch: is given those that are narrowed, on all ranks.
        forget: is given the courses of those that no rank has any more, on all ranks.
        is_pending: true while ranks have not summed the model's gradients.
    """

    def __init__(
        self,
        store: ParamStore,
        known: Optimizer | None,
        stages: int,
        see_other: Callable[[Optimizer], None],
        watch: Callable[[Optimizer], None],
        forget: Callable[[Course], None],
        is_pending: Callable[[], bool],
    ) -> None:
        self._store = store
        self._params = set(map(id, store.params.values()))
        self._known = known if known is None else weakref.ref(known)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # An optimizer that the script has dropped may still be there on other ranks.
        self._narrowed: list[_Narrowed] = []
        self._many = _FEW
        self._stages = stages
        self._see_other = see_other
        self._watch = watch
        self._forget = forget
        self._is_pending = is_pending
        watch_pending(self)
        _watch_steps()
        _watching.add(self)

    def look_at(self, optimizer: Optimizer) -> None:
        """Narrows an optimizer that is about to step, if it has parameters of the model."""
        if self._is_pending() and process.get_world_size() > 1 and self._has_some_of(optimizer):
            refuse_unsummed("optimizer.step()")
        if optimizer not in self._seen:
            # What it lists is hidden from those that share it, while it steps with them.
            for each in with_inner(optimizer):
                if each not in self._seen:
                    self._look_at_new(each)

    def _look_at_new(self, optimizer: Optimizer) -> None:
        if self._known is not None and optimizer is self._known():
            self._seen.add(optimizer)
            return
        lists_own = self._has_some_of(optimizer) and not leaves_all_to_inner(optimizer)
        if lists_own:
            refuse_sparse(optimizer, self._params)
            self._refuse_inside_backward(optimizer)
            if self._lists_of_some_ranks(optimizer):
                refuse_later_across(optimizer, self._stages, process.own_device())
        self._seen.add(optimizer)
        if lists_own:
            found = UserOptimizer.of(optimizer)
            with collective("optimizer.step()"):
                found.narrow(self._store)
                self._forget_gone()
            self._refuse_beside(found)
            self._watch(optimizer)
            is_all = self._params.issuperset(found.listed_ids())
            self._narrowed.append(_Narrowed(weakref.ref(found), course_of(optimizer), is_all))
        elif not UserOptimizer.is_one_of(optimizer) and not any(other._has_some_of(optimizer) for other in _watching):
            self._see_other(optimizer)

    def _forget_gone(self) -> None:
        """Lets go of what no rank has any more, unless ranks have called it differently, which the next call tells.

        All ranks call it.
        """
        if len(self._narrowed) < self._many:
            return
        own = {place: each.course.told() for place, each in enumerate(self._narrowed) if each.found() is None}
        everyone: list[dict[int, list[tuple[str, int]]]] = agree.gather_objects(own)
        gone = {place for place, told in own.items() if all(other.get(place) == told for other in everyone)}
        for place in gone:
            self._forget(self._narrowed[place].course)
        self._narrowed = [each for place, each in enumerate(self._narrowed) if place not in gone]
        self._many = max(_FEW, 2 * len(self._narrowed))

    def _refuse_beside(self, optimizer: UserOptimizer) -> None:
        """Raises where it trains what is beside the model: ranks have averaged no gradients of that."""
        beside = [param for param in optimizer.everywhere() if param.grad is not None]
        if beside and process.get_world_size() > 1:
            raise RaNNCError(
                f"an optimizer that RaNNCModule was not given has parameters of the model and {len(beside)} others "
                f"with gradients (the first of shape {tuple(beside[0].shape)}), which each rank has of its own rows: "
                "make the optimizer first and give it to RaNNCModule(model, optimizer), or one of its own to those"
            )

    def has_pending(self, params: Set[int]) -> bool:
        """True while ranks have not summed the gradients of some of these parameters, by ``id``."""
        return self._is_pending() and not self._params.isdisjoint(params)

    def _has_some_of(self, optimizer: Optimizer) -> bool:
        return any(id(param) in self._params for group in optimizer.param_groups for param in group["params"])

    def _refuse_inside_backward(self, optimizer: Optimizer) -> None:
        """Raises where only some ranks come to a step: a hook runs where its parameter is."""
        if graph_task() < 0:
            return
        for name in self._lists_of_some_ranks(optimizer):
            raise RaNNCError(
                f'optimizer.step() was called inside of a backward, as by a hook, for parameter "{name}", which '
                "is not on all ranks, so not all of them may come to it: call it after loss.backward(), or give "
                "every rank all parameters with a plan of one Stage (RANNC_PARTITION_NUM=1)"
            )

    def _lists_of_some_ranks(self, optimizer: Optimizer) -> list[str]:
        """Parameters that an optimizer lists, by name, which are not on all ranks."""
        listed = {id(param) for group in optimizer.param_groups for param in group["params"]}
        ranks, holders = process.get_world_size(), self._store.holders
        return [name for name, param in self._store.used.items() if id(param) in listed and len(holders[name]) < ranks]

    def note_clear(self) -> None:
        """The model's gradients are cleared, and with them all of those that have no others."""
        for each in self._narrowed:
            if each.cleared_with_model:
                each.course.clear()

    def widen(self) -> None:
        """Gives them their parameters back, with the state of all ranks. All ranks call it."""
        alive = [(number, found) for number, each in enumerate(self._narrowed) if (found := each.found()) is not None]
        everywhere = set.intersection(*map(set, agree.gather_objects([number for number, _ in alive])))
        for number, narrowed in alive:
            if number in everywhere:
                narrowed.widen(self._store)

    def end(self) -> None:
        """Looks at no optimizer any more."""
        _watching.discard(self)


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@kept_uncompiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _looking
    if _looking:
        return
    _looking = True
    try:
        for watching in list(_watching):
            watching.look_at(optimizer)
    finally:
        _looking = False
    hide_last(optimizer)
