"""Whether what ranks have to have alike on their devices still is, found out without waiting for the devices."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyrannc.call.equal import digest
from pyrannc.call.sent import Sent
from pyrannc.capture.torch_internals.gradients import norm_of_each
from pyrannc.errors import MismatchError
from pyrannc.job import agree, process
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")
_LATER = 2
"""Calls after which a device has long come to what it was asked for."""
_APART = 100
"""Calls between two looks, at most; at first there are fewer."""
_ROUNDINGS, _MOST = 100, 0.01
"""By how many roundings, and by which share at most, copies may differ: each kind of device rounds its way."""

_FADING = 0.99
"""What is left of a factor from one backward to the next: such as ranks have in turns do not make up for each other."""

_PLAIN = nn.Parameter, Tensor
"""What is no other class of tensor, such as those whose parts lie on several ranks."""

_Ranks = tuple[int, ...]
_BESIDE: _Ranks = (-1,)
"""In the place of ranks: what the model's optimizer trains beside it, on all of them."""
_OTHERS: _Ranks = ()
"""Likewise: what is no model's, which every rank may have."""


class Drift:
    """Compares copies of parameters, and what the script multiplies a loss with, a few calls after they were there.

    It looks at the calls 1, 3, 6, 12 and so on, later at every hundredth, and when it is asked to.
    """

    def __init__(self) -> None:
        self._params: dict[_Ranks, dict[str, Tensor]] = {}
        self._calls = 0
        self._look_at = 1
        self._compare_at = 0
        self._norms: dict[_Ranks, Sent] = {}
        self._factors: Tensor | None = None
        self._factor: tuple[Sent, float] | None = None
        self._rounds = torch.float32
        self._others: list[weakref.ref[Optimizer]] = []
        self._find_beside: Callable[[], Mapping[str, Tensor]] = dict

    def watch_beside(self, find: Callable[[], Mapping[str, Tensor]]) -> None:
        """Compares what ``find`` gives too, by name: it is on all ranks, and may change from call to call."""
        self._find_beside = find

    def watch_other(self, optimizer: Optimizer) -> None:
        """Tells of the parameters of an optimizer that has none of a wrapped model's, should ranks train them apart."""
        self._others.append(weakref.ref(optimizer))

    def watch(self, params: Mapping[str, Tensor], holders: Mapping[str, _Ranks]) -> None:
        """Takes these for the parameters to compare; what was seen of the same ones stays.

        Args:
            params: of which this rank has the whole, by first name.
            holders: by first name, all ranks that have it.
        """
        former, self._params = self._params, {}
        for name, param in params.items():
            if len(holders[name]) > 1 and _has_norm(param):
                self._params.setdefault(holders[name], {})[name] = param
        alike = [ranks for ranks, params in self._params.items() if [*params] == [*former.get(ranks, ())]]
        self._norms = {ranks: self._norms[ranks] for ranks in alike if ranks in self._norms}

    def follow(self) -> None:
        """Compares what an earlier call has begun with, and looks at what this one does. All ranks call it.

        Raises:
            MismatchError: copies of a parameter differ, or factors of the loss do.
        """
        if process.get_world_size() == 1:
            return
        self._calls += 1
        compares, looks = self._calls == self._compare_at, self._calls == self._look_at
        if looks:
            # Before anything raises: a script may go on.
            self._compare_at = self._calls + _LATER
            self._look_at = max(self._compare_at, min(2 * self._calls, self._calls + _APART))
        if compares:
            self._compare()
        if looks:
            agree.together(self._look)

    def look_now(self) -> None:
        """Likewise, of copies as they are now, waiting for the devices. All ranks call it."""
        if process.get_world_size() == 1:
            return
        # Also where nothing has been looked at: ranks may have been interrupted at different calls.
        self._compare()
        agree.together(self._look)
        self._compare()

    @torch.no_grad()
    def note_factor(self, factor: Tensor) -> None:
        """Takes note of the gradient that the script gives to a loss: all since the last look add up, fading."""
        if process.get_world_size() == 1:
            return
        factor, self._rounds = factor.detach(), factor.dtype
        wide = factor.to(torch.promote_types(factor.dtype, torch.float32))
        self._factors = wide.clone() if self._factors is None else torch.add(wide, self._factors, alpha=_FADING)

    @torch.no_grad()
    def _look(self) -> None:
        groups = self._groups().items()
        if self._factors is not None:
            self._factor = Sent(self._factors), _tolerated(self._rounds)
            self._factors = None
        self._norms = {ranks: Sent(torch.stack(norm_of_each([*params.values()]))) for ranks, params in groups if params}

    def _groups(self) -> dict[_Ranks, dict[str, Tensor]]:
        beside = {name: param for name, param in self._find_beside().items() if _has_norm(param)}
        return {**self._params, _BESIDE: beside, _OTHERS: self._of_others()}

    def _of_others(self) -> dict[str, Tensor]:
        """Plain tensors on this rank's device, by the form of what their optimizer lists, and their place in it."""
        device, found = process.own_device(), dict[str, Tensor]()
        for optimizer in filter(None, (ref() for ref in self._others)):
            listed = [param for group in optimizer.param_groups for param in group["params"]]
            form = f"{type(optimizer).__name__} {[tuple(param.shape) for param in listed]}"
            for place, param in enumerate(listed):
                if type(param) in _PLAIN and param.device == device and _has_norm(param) and param.numel():
                    found.setdefault(f"{form} {place}", param)
        return found

    def _compare(self) -> None:
        norms, factor = self._norms, self._factor
        self._norms, self._factor = {}, None
        digests = {ranks: digest(sent.arrived()) for ranks, sent in norms.items()}
        everyone: list[tuple[dict[_Ranks, int], _Factor | None]]
        everyone = agree.gather_objects(
            (digests, None if factor is None else _Factor(float(factor[0].arrived()), factor[1]))
        )
        _refuse_factors([found for _, found in everyone])
        known: dict[_Ranks, int] = {}
        differ = {ranks for own, _ in everyone for ranks in own if known.setdefault(ranks, own[ranks]) != own[ranks]}
        # They may be alike again by now, and what ranks round is let pass.
        if differ - {_OTHERS}:
            _refuse_copies(self._everyones_copies(differ - {_OTHERS}))
        if _OTHERS in differ and _first_apart(self._everyones_copies({_OTHERS})) is not None:
            self._others.clear()
            if process.get_rank() == 0:
                _log.warning("%s", _TRAINED_APART)

    def _everyones_copies(self, groups: set[_Ranks]) -> list[dict[str, _Copy]]:
        """Of each rank; all ranks call it."""
        return agree.gather_objects(agree.together(lambda: self._copies(groups)))

    @torch.no_grad()
    def _copies(self, groups: set[_Ranks]) -> dict[str, _Copy]:
        """The parameters as they are now; waits for the device."""
        known = self._groups()
        params = {name: param for ranks in groups for name, param in known.get(ranks, {}).items()}
        found = zip(params.items(), norm_of_each([*params.values()]), strict=True)
        return {name: _Copy(float(norm), _sum(param), _tolerated(param.dtype)) for (name, param), norm in found}


@dataclass(frozen=True)
class _Factor:
    """What losses were multiplied with, added up, and by which share it may differ."""

    value: float
    tolerated: float


@dataclass(frozen=True)
class _Copy:
    """A copy of a parameter: its norm, the sum of its elements, and by which share of the norm both may differ.

    The sum differs by about the norm of the difference, if that has no sign; copies that were drawn otherwise have the
    same norm.
    """

    norm: float
    sum: float
    tolerated: float

    def apart(self, other: _Copy) -> float:
        """The share of the norm by which another copy differs from this one."""
        worst = max(_difference(self.norm, other.norm), _difference(self.sum, other.sum))
        if not worst:
            return 0.0
        return worst / self.norm if 0 < self.norm < math.inf else math.inf


def _first_apart(everyone: Sequence[Mapping[str, _Copy]]) -> tuple[str, int, int, float] | None:
    """Which copies differ, by more than rounding: their name, two ranks that have them, and by how much."""
    first: dict[str, int] = {}
    for rank, copies in enumerate(everyone):
        for name, copy in copies.items():
            other = first.setdefault(name, rank)
            apart = everyone[other][name].apart(copy)
            if apart > copy.tolerated:
                return name, other, rank, apart
    return None


def _refuse_copies(everyone: Sequence[Mapping[str, _Copy]]) -> None:
    found = _first_apart(everyone)
    if found is not None:
        raise MismatchError(_different(*found))


_TRAINED_APART = (
    "an optimizer that RaNNCModule was not given trains parameters that are no longer the same on all ranks, each rank "
    "by the gradients of its own rows, as those of layers beside the model. Give RaNNCModule one optimizer that has "
    "them and the model's, in groups of their own (their gradients are averaged then), or average their gradients "
    "over ranks before its step; nothing is wrong if each rank is meant to have its own"
)


def _different(name: str, first: int, other: int, apart: float) -> str:
    return (
        f'ranks {first} and {other} train copies of parameter "{name}" that are not the same (they differ by '
        f"{apart:.1e} of its norm): the script has changed it or its gradient on one rank alone, or differently on "
        "each, or has trained the wrapped model by calls of its own, or they have differed from the start, with "
        "sync_params_on_init(False). Call what RaNNCModule has made, draw noise and new values from generators that "
        "are seeded alike, and set, clip and clear gradients alike on all ranks; undeploy() gives the model back all "
        "the same, with one rank's copy of each parameter"
    )


def _refuse_factors(everyone: Sequence[_Factor | None]) -> None:
    factors = {rank: factor for rank, factor in enumerate(everyone) if factor is not None}
    if not factors:
        return
    first = min(factors)
    for rank, factor in factors.items():
        known = factors[first]
        if _difference(known.value, factor.value) > known.tolerated * abs(known.value):
            raise MismatchError(
                f"backwards of the loss began with another factor on rank {rank} than on rank {first} (added up over "
                f"calls, fading: {factor.value!r} and {known.value!r}). The loss that the model returns is that of the "
                "global batch, the same on all ranks: multiply it by the same number on all of them, or weight rows "
                "inside of the model"
            )


def _difference(first: float, other: float) -> float:
    if first == other or (math.isnan(first) and math.isnan(other)):
        return 0.0
    difference = abs(first - other)
    return difference if math.isfinite(difference) else math.inf


def _has_norm(param: Tensor) -> bool:
    return (param.is_floating_point() or param.is_complex()) and param.itemsize > 1


def _sum(param: Tensor) -> float:
    elements = torch.view_as_real(param) if param.is_complex() else param
    return float(elements.sum(dtype=torch.float64))


def _tolerated(dtype: torch.dtype) -> float:
    return min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST)
