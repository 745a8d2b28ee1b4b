"""The user's optimizer: it steps with the parameters of one rank, its state is that of all."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyrannc.capture.torch_internals.gradients import take_hooks
from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.job.exchange import give_to_others
from pyrannc.job.faults import collective
from pyrannc.store.by_element import is_by_element
from pyrannc.store.carry import Route, carry
from pyrannc.store.course import course_of
from pyrannc.store.divided import DividedParams, part_of_state, whole_state
from pyrannc.store.elsewhere import is_elsewhere
from pyrannc.store.no_state import forget_missing
from pyrannc.store.optimizer_state import (
    by_number,
    drop_state,
    of_no_param,
    on_own_device,
    placed,
    put_state,
    refuse_misfit,
)
from pyrannc.store.own_listed import (
    all_listed,
    begin_sharing,
    end_failed_step,
    note_clear,
    own_listed,
    show_state,
    step_with_own,
)
from pyrannc.store.param_lists import Listed, ParamLists
from pyrannc.store.shown_state import kept_state
from pyrannc.store.spread_tensor import is_spread
from pyrannc.store.store import ParamStore
from pyrannc.store.unscale import forget_overflow
from pyrannc.switches import switches


class UserOptimizer:
    """Keeps class and param groups of an optimizer, but has it step with this rank's parameters only.

    Outside of ``step`` and ``zero_grad`` its ``param_groups`` list the parameters of all ranks, as the model does:
    what reads the contents of others, such as a clipping of gradients, is told so.

    ``state_dict`` and ``load_state_dict`` of the optimizer get an argument ``from_global``: the state of all ranks'
    parameters, in the original order, on rank 0.

    Attributes:
        optimizer: the user's.
        number: among all that train deployed models, equal on all ranks; -1 before.
    """

    _numbered: ClassVar[weakref.WeakValueDictionary[int, UserOptimizer]] = weakref.WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = count()

    @classmethod
    def of(cls, optimizer: Optimizer) -> UserOptimizer:
        """The one of an optimizer, which several models may share."""
        made = cls._of_known(optimizer)
        return cls(optimizer) if made is None else made

    @classmethod
    def is_one_of(cls, optimizer: Optimizer) -> bool:
        """True for the optimizer of a wrapped model."""
        return cls._of_known(optimizer) is not None

    @classmethod
    def deployed(cls) -> list[UserOptimizer]:
        """Those that train deployed models."""
        return [own for _, own in sorted(cls._numbered.items()) if own._lists is not None]

    @classmethod
    def widen_all(cls, store: ParamStore) -> None:
        """A model is taken back: does the same to all that some rank has not dropped. All ranks call it."""
        own = {number for number, each in cls._numbered.items() if each._lists is not None}
        for number in sorted(set.intersection(*agree.gather_objects(own))):
            cls._numbered[number].widen(store)

    @classmethod
    def _of_known(cls, optimizer: Optimizer) -> UserOptimizer | None:
        made = getattr(getattr(optimizer, "__dict__", {}).get("state_dict"), "__self__", None)
        return made if isinstance(made, cls) else None

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise RaNNCError(
                f"the optimizer is a {type(optimizer).__name__}, but RaNNCModule takes one torch.optim.Optimizer; "
                "further ones work beside it without being given to it"
            )
        self.optimizer = optimizer
        self.number = -1
        self._lists: ParamLists | None = None
        self._first_has_state = False
        self._listed_key: tuple[list[int], list[int]] | None = None
        self._listed_flags = torch.empty(0, device="cpu")
        self._plain_state_dict = optimizer.state_dict
        self._plain_load_state_dict = optimizer.load_state_dict
        self._plain_add_param_group = optimizer.add_param_group
        self._plain_zero_grad = optimizer.zero_grad
        optimizer.state_dict = self._state_dict  # type: ignore[method-assign]  # the contract adds an argument
        optimizer.load_state_dict = self._load_state_dict  # type: ignore[method-assign]  # likewise
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]  # all ranks call it
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]  # it costs nothing for other ranks' parameters
        take_hooks(optimizer)
        # A model may be deployed within a step, whose closure calls it first.
        step_with_own(optimizer, self._divided)

    def __deepcopy__(self, memo: dict[int, Any]) -> UserOptimizer:
        return UserOptimizer.of(copy.deepcopy(self.optimizer, memo))

    # What is listed where

    def listed_ids(self) -> list[int]:
        """``id`` of the parameters of all ranks that it lists now; none while no model is deployed."""
        return [] if self._lists is None else list(map(id, self.listed()))

    def all(self) -> list[Tensor]:
        """The parameters of all ranks."""
        lists = self._lists if self._lists is not None else ParamLists(self.optimizer)
        return [item.param for item in lists.all()]

    def everywhere(self) -> list[Tensor]:
        """The parameters that no Stage computes with, as it lists them now; none while no model is deployed."""
        return [] if self._lists is None else self._lists.everywhere()

    def beside(self, store: ParamStore) -> dict[str, Tensor]:
        """Those of them on this rank's device that are not the model's, by names for messages."""
        own, device = set(map(id, store.params.values())), process.own_device()
        return {
            f"{place} beside the model": param
            for place, param in enumerate(self.everywhere())
            if id(param) not in own and type(param) is nn.Parameter and param.device == device
        }

    @cached_property
    def is_by_element(self) -> bool:
        """Each element of a parameter is updated by itself."""
        return is_by_element(self.optimizer, process.own_device())

    def listed(self) -> list[Tensor]:
        """The parameters that it lists now, outside of its steps."""
        return all_listed(self.optimizer)

    def listed_of(self, params: Iterable[Tensor]) -> Tensor:
        """Those of a model's parameters that it lists now: 1, else 0, in float32 on this rank's device."""
        key = self.listed_ids(), list(map(id, params))
        if key != self._listed_key:
            listed = set(key[0])
            flags = [float(param in listed) for param in key[1]]
            self._listed_key = key
            self._listed_flags = torch.tensor(flags, dtype=torch.float32, device=process.own_device())
        return self._listed_flags

    def meets_others(self) -> bool:
        """True where it lists what other ranks have a part of, or all, or of whose gradient they have."""
        with DisableTorchFunctionSubclass():
            return any(
                is_elsewhere(param) or is_spread(param) or (param.grad is not None and is_spread(param.grad))
                for param in self.listed()
            )

    # Deployment

    def former(self) -> Callable[[], None]:
        """What brings back all that a deployment changes, on this rank alone."""
        end_failed_step(self.optimizer)
        optimizer, lists, has_state = self.optimizer, self._lists, self._first_has_state
        stores = [] if lists is None else list(lists.stores)
        params = [list(group["params"]) for group in optimizer.param_groups]
        state = {
            param: dict(values) if isinstance(values, dict) else values for param, values in optimizer.state.items()
        }

        def come_back() -> None:
            for group, listed in zip(optimizer.param_groups, params, strict=True):
                if list(map(id, group["params"])) != list(map(id, listed)):
                    group["params"] = listed
            optimizer.state.clear()
            optimizer.state.update(state)
            if lists is not None:
                for store in [store for store in lists.stores if store not in stores]:
                    lists.remove(store)
            self._lists, self._first_has_state = lists, has_state

        return come_back

    def narrow(self, store: ParamStore) -> None:
        """A model has been deployed: leaves each rank its parameters' state, and these to step with. All ranks call it.

        State that was there before is rank 0's, as parameters are, unless ``sync_params_on_init`` is off.

        Raises:
            MismatchError: the ranks' optimizers list different parameters.
        """
        first, device = self._lists is None, process.own_device()
        lists = self._lists if self._lists is not None else ParamLists(self.optimizer)
        if not first:
            lists.follow()
        lists.add(store)
        lists.agree()
        self._lists = lists
        if self.number < 0:
            self.number = next(self._numbers)
            self._numbered[self.number] = self
        of_model = set(map(id, store.params.values()))
        moved = [item for item in lists.all() if first or id(item.param) in of_model]
        if process.get_world_size() > 1 and (switches().sync_params_on_init or self._first_has_state):
            self._take_first_state(moved, device, loose=first)
            self._first_has_state = False
        agree.together(lambda: self._leave_own(moved))
        if first and switches().sync_params_on_init:
            _give_params(self.everywhere())

    def _leave_own(self, moved: list[Listed]) -> None:
        """Drops the state of what is of other ranks, and puts that of the others where it belongs."""
        begin_sharing(self.optimizer)
        rank = process.get_rank()
        drop_state(self.optimizer, [item.param for item in moved if rank not in item.ranks])
        for item in moved:
            if rank in item.ranks:
                self._place(item)
        self._show_state()

    def _take_first_state(self, items: list[Listed], device: torch.device, *, loose: bool) -> None:
        """Gives the ranks that list a parameter rank 0's state of it, and all of them what is of no parameter."""
        state = self.optimizer.state
        if loose:
            others = agree.broadcast_object({key: state[key] for key in state if not isinstance(key, Tensor)})
            for key in [key for key in state if not isinstance(key, Tensor)]:
                del state[key]
            state.update(others)
        own = {item.number: state[item.param] for item in items if item.param in state}
        found = carry(own, [Route(item.number, 0, item.ranks) for item in items], device)
        if process.get_rank() != 0:
            drop_state(self.optimizer, [item.param for item in items if item.number not in found])
            for item in items:
                if item.number in found:
                    put_state(self.optimizer, item.param, found[item.number])

    def _place(self, item: Listed) -> None:
        state = self.optimizer.state
        if item.param in state:
            settings = self.optimizer.param_groups[item.group]
            put_state(self.optimizer, item.param, placed(item.param, _own_part(item, state[item.param]), settings))

    def _show_state(self) -> None:
        """Shows what has been put under parameters as scripts find it."""
        show_state(self.optimizer, self._divided())

    @property
    def divides_state(self) -> bool:
        """Each rank has a part of what it keeps for some parameters."""
        return bool(self._divided())

    def _divided(self) -> list[DividedParams]:
        return [] if self._lists is None else self._lists.divided

    def join_parts(self, store: ParamStore) -> None:
        """Before a model's parameters are divided otherwise: gives every rank the whole state of those that it holds.

        All ranks call it, and :meth:`divide_anew` after it.
        """
        for item, state in self._joined(store):
            put_state(self.optimizer, item.param, state)

    def _joined(self, store: ParamStore) -> list[tuple[Listed, Any]]:
        lists = self._lists
        if lists is None or store not in lists.stores or not lists.divided:
            return []
        end_failed_step(self.optimizer)
        self._show_state()
        ids = set(map(id, store.params.values()))
        items = [item for item in lists.all() if item.parts and id(item.param) in ids]
        holders = {id(param): store.holders.get(name, ()) for name, param in store.params.items()}
        found = self._collect(self.optimizer.state, items, lambda item: holders[id(item.param)])
        return [(item, found[item.number]) for item in items if item.number in found]

    def divide_anew(self, store: ParamStore) -> None:
        """Leaves each rank its part of the state."""
        if self._lists is not None and store in self._lists.stores:
            ids = set(map(id, store.params.values()))
            self._leave_own([item for item in self._lists.all() if id(item.param) in ids])

    def _collect(
        self, state: Mapping[Any, Any], items: Sequence[Listed], receivers: Callable[[Listed], tuple[int, ...]]
    ) -> dict[int, Any]:
        """The whole state of parameters, by number, for the ranks that get it. All ranks call it."""
        sources = [(item, part) for item in items for part in item.parts or (None,)]
        routes = [
            Route(key, item.ranks[0] if part is None else part.rank, receivers(item))
            for key, (item, part) in enumerate(sources)
        ]
        own = {
            route.key: kept_state(state[item.param])
            for route, (item, _) in zip(routes, sources, strict=True)
            if route.source == process.get_rank() and item.param in state
        }
        arrived = carry(own, routes, process.own_device())
        found: dict[int, Any] = {}
        parts: dict[int, list[Any]] = {}
        for key, (item, part) in enumerate(sources):
            if key in arrived and part is not None:
                parts.setdefault(item.number, []).append((part, arrived[key]))
            elif key in arrived:
                found[item.number] = arrived[key]
        by_number = {item.number: item for item in items}
        return found | {
            number: whole_state(states, by_number[number].param, torch.device("cpu"))
            for number, states in parts.items()
        }

    def widen(self, store: ParamStore) -> None:
        """A model is taken back: gives every rank its parameters, with their state on the host. All ranks call it."""
        lists = self._lists
        if lists is None or store not in lists.stores:
            return
        lists.follow()
        self._show_state()
        held = set(map(id, store.used.values()))
        items = [item for item in lists.all() if id(item.param) in held]
        everyone = process.all_ranks()
        found = self._collect(self.optimizer.state, items, lambda _: everyone)
        for item in items:
            if item.number in found:
                put_state(self.optimizer, item.param, found[item.number])
        for group, settings in zip(self.optimizer.param_groups, self._set_by_steps(lists.all()), strict=True):
            group.update(settings)
        lists.remove(store)
        if lists.stores:
            return
        state = self.optimizer.state
        forget_missing(state)
        in_order = [(item.param, state.pop(item.param)) for item in lists.all() if item.param in state]
        state.update(in_order)
        self._lists = None

    # The optimizer's methods

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group, as torch does. After deployment all ranks call it.

        Args:
            param_group: with parameters of any rank; what lies on other ranks may be missing.
        """
        if self._lists is None:
            self._plain_add_param_group(param_group)
            return
        lists = self._lists
        with collective("optimizer.add_param_group(...)"):
            lists.follow()
            before = set(map(id, self.everywhere()))
            try:
                agree.together(lambda: self._plain_add_param_group(param_group))
            except Exception:
                del self.optimizer.param_groups[len(lists.sizes) :]
                raise
            lists.follow()
            if switches().sync_params_on_init:
                _give_params([param for param in self.everywhere() if id(param) not in before])

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        forget_overflow(self.listed_ids())
        note_clear(self.optimizer)
        if self._only_lets_go(*args, **kwargs):
            end_failed_step(self.optimizer)
            # Parameters of other ranks have none to let go of. What classes of tensors would say takes time for each.
            with DisableTorchFunctionSubclass():
                self._plain_zero_grad(*args, **kwargs)
            return
        with own_listed(self.optimizer):
            self._plain_zero_grad(*args, **kwargs)

    def _only_lets_go(self, set_to_none: bool = True, *args: Any, **kwargs: Any) -> bool:
        """True where gradients are set to None by torch's own method, and nothing reads them."""
        is_torchs = getattr(self._plain_zero_grad, "__func__", None) is Optimizer.zero_grad
        return bool(is_torchs and set_to_none and not args and not kwargs)

    def _state_dict(self, from_global: bool | None = None) -> dict[str, Any]:
        """The optimizer's state.

        Args:
            from_global: True: the state of all ranks' parameters, with the original numbering, on the host of rank 0,
                and an empty dict elsewhere; all ranks call it. False: that of the parameters that this rank updates.
                Left out: both, where they are the same.

        Raises:
            RaNNCError: ``from_global`` is left out, and other ranks have a part of the state.
        """
        if not from_global:
            self._refuse_part(from_global, "state_dict(from_global=True)")
            self._show_state()
            with own_listed(self.optimizer):
                found = self._plain_state_dict()
            if not self._divided():
                return found
            return {**found, "state": {key: kept_state(value) for key, value in found["state"].items()}}
        with collective("optimizer.state_dict(from_global=True)"):
            if self._lists is None:
                return self._plain_state_dict() if process.get_rank() == 0 else {}
            return self._whole_state_dict(self._lists)

    def _refuse_part(self, from_global: bool | None, instead: str) -> None:
        if from_global is None and self._lists is not None and self._lists.is_spread:
            name = instead.partition("(")[0]
            raise RaNNCError(
                f"optimizer.{name}() would be about the parameters of rank {process.get_rank()} alone; call "
                f"optimizer.{instead} on all ranks: the state is that of all parameters, on rank 0. (With "
                "from_global=False it is this rank's part.)"
            )

    def _whole_state_dict(self, lists: ParamLists) -> dict[str, Any]:
        lists.follow()
        self._show_state()
        local = agree.together(self._plain_state_dict)
        state, items = by_number(local), lists.all()
        own = {item.param: state[item.number] for item in items if item.number in state}
        found = self._collect(own, items, lambda _: (0,))
        groups = [
            {**group, **settings}
            for group, settings in zip(local["param_groups"], self._set_by_steps(items), strict=True)
        ]
        if process.get_rank() != 0:
            return {}
        return {**local, "param_groups": groups, "state": {**dict(sorted(found.items())), **of_no_param(local)}}

    def _set_by_steps(self, items: Sequence[Listed]) -> list[dict[str, Any]]:
        """By group, what its settings are that steps change: other ranks may have stepped without it.

        All ranks call it.
        """
        groups, names = self.optimizer.param_groups, course_of(self.optimizer).set_by_steps
        own = [
            {name: group[name] for name in names if name in group and not isinstance(group[name], Tensor)}
            for group in groups
        ]
        everyone: list[list[dict[str, Any]]] = agree.gather_objects(own)
        first = [0] * len(groups)
        for item in reversed(items):
            first[item.group] = min(item.ranks)
        return [everyone[rank][place] for place, rank in enumerate(first)]

    def _load_state_dict(self, state_dict: dict[str, Any], from_global: bool | None = None) -> None:
        """Takes back what ``state_dict`` gave.

        Args:
            state_dict: with ``from_global``, only rank 0's counts; all ranks call it.
            from_global: as in ``state_dict``.

        Raises:
            InputError: it is not a state of this optimizer; nothing has changed then.
            RaNNCError: ``from_global`` is left out, and other ranks have a part of the state.
        """
        if not from_global:
            self._refuse_part(from_global, "load_state_dict(state, from_global=True)")
            with own_listed(self.optimizer):
                self._plain_load_state_dict(state_dict)
            self._show_state()
            return
        with collective("optimizer.load_state_dict(..., from_global=True)"):
            if self._lists is not None:
                self._lists.follow()
            lists = self._lists if self._lists is not None else ParamLists(self.optimizer)
            self._load_whole(state_dict, lists)

    def _load_whole(self, state_dict: dict[str, Any], lists: ParamLists) -> None:
        """Before deployment rank 0 keeps the state: nobody knows yet who needs which part of it."""
        first, items = process.get_rank() == 0, lists.all()
        agree.together(lambda: refuse_misfit(state_dict, self.optimizer, items, lists.sizes) if first else None)
        kept = {**state_dict, "state": of_no_param(state_dict)} if first else None
        local = agree.broadcast_object(kept)
        receivers = [item.ranks if self._lists is not None else (0,) for item in items]
        routes = [Route(item.number, 0, ranks) for item, ranks in zip(items, receivers, strict=True)]
        found = carry(by_number(state_dict) if first else {}, routes, process.own_device())
        if self._lists is not None:
            found = {item.number: _own_part(item, found[item.number]) for item in items if item.number in found}
        state = {**local["state"], **found}
        ends = list(accumulate(lists.sizes))
        settings = on_own_device(local["param_groups"], process.own_device())
        groups = [
            {**group, "params": list(range(end - size, end))}
            for group, size, end in zip(settings, lists.sizes, ends, strict=True)
        ]
        agree.together(lambda: self._plain_load_state_dict({**local, "state": state, "param_groups": groups}))
        self._show_state()
        self._first_has_state = self._lists is None


def _own_part(item: Listed, state: Any) -> Any:
    """Of the state of a whole parameter what this rank keeps."""
    part = item.part_on(process.get_rank())
    return state if part is None or not isinstance(state, Mapping) else part_of_state(state, item.param, part)


@torch.no_grad()
def _give_params(params: list[Tensor]) -> None:
    """Gives every rank the parameters of rank 0, as the model's."""
    for param in params:
        if process.get_world_size() > 1:
            given = param.detach().clone(memory_format=torch.contiguous_format)
            give_to_others(given, 0)
            # Autograd may have saved it, as what the model takes was computed with it: a copy would count as a change.
            if not torch.equal(given, param):
                param.copy_(given)
