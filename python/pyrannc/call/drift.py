"""Whether what ranks have to have alike on their devices still is, found out without waiting for the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrannc.call.equal import EVERY, digest
from pyrannc.call.sent import Sent
from pyrannc.capture.torch_internals.gradients import norm_of_each
from pyrannc.errors import MismatchError
from pyrannc.job import agree, process

_LATER = 2
"""Calls after which a device has long come to what it was asked for."""
_ROUNDINGS, _MOST = 100, 0.01
"""By how many roundings, and by which share at most, sizes of copies may differ: each kind of device rounds its way."""


class Drift:
    """Compares copies of parameters, and what the script multiplies a loss with, a few calls after they were there.

    That is at the calls 1, 2, 4 and so on, and at every hundredth.

    Args:
        params: of which this rank has the whole, by first name.
        stages: the ranks of each Stage.
    """

    def __init__(self, params: Mapping[str, Tensor], stages: Sequence[Sequence[int]]) -> None:
        self._stages = [ranks for ranks in stages if len(ranks) > 1]
        self._replicas = next((ranks for ranks in self._stages if process.get_rank() in ranks), ())
        self._params = {name: param for name, param in params.items() if self._replicas and _has_size(param)}
        self._calls = 0
        self._seen: _Seen | None = None

    def follow(self) -> None:
        """Compares what an earlier call has begun with, and looks at what this one does. All ranks call it.

        Raises:
            MismatchError: copies of a parameter differ, or factors of the loss do.
        """
        if process.get_world_size() == 1:
            return
        self._calls += 1
        seen = self._seen
        if seen is not None and self._calls >= seen.call + _LATER:
            self._seen = None
            self._compare(seen)
        if self._seen is None and _is_due(self._calls):
            self._seen = _Seen(self._calls, Sent(_sizes([*self._params.values()])))

    def note_factor(self, factor: Tensor) -> None:
        """Takes note of the gradient that the script gives to the loss of this call."""
        if self._seen is not None and self._seen.call == self._calls:
            self._seen.factor = Sent(factor.detach())

    def _compare(self, seen: _Seen) -> None:
        factor = 0 if seen.factor is None else digest(seen.factor.arrived()) + 1
        everyone = agree.gather_numbers((digest(seen.sizes.arrived()), factor))
        factors = {number for _, number in everyone if number}
        if len(factors) > 1:
            raise MismatchError(_different_factors(seen.factor))
        if any(len({everyone[rank][0] for rank in ranks}) > 1 for ranks in self._stages):
            found: list[list[float]] = agree.gather_objects(seen.sizes.arrived().tolist())
            agree.together(lambda: self._refuse_different(found))

    def _refuse_different(self, found: Sequence[Sequence[float]]) -> None:
        for rank in self._replicas[1:]:
            pairs = zip(self._params.items(), found[self._replicas[0]], found[rank], strict=True)
            for (name, param), first, other in pairs:
                if not _alike(first, other, param.dtype):
                    raise MismatchError(
                        f'ranks {self._replicas[0]} and {rank} train copies of parameter "{name}" which are no longer '
                        f"the same (of size {first:.6g} and {other:.6g}): the script has changed it or its gradient "
                        "on some rank alone, or otherwise there. Draw noise and new values from generators that are "
                        "seeded alike, and set, clip and clear gradients alike on all ranks"
                    )


@dataclass
class _Seen:
    """What a call has begun with.

    Attributes:
        call: its number.
        sizes: of the copies.
        factor: of its loss, if there was a backward.
    """

    call: int
    sizes: Sent
    factor: Sent | None = None


def _sizes(params: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each."""
    sizes = norm_of_each([param.detach() for param in params])
    return torch.stack(sizes) if sizes else torch.empty(0)


def _is_due(call: int) -> bool:
    return call & (call - 1) == 0 or call % EVERY == 0


def _has_size(param: Tensor) -> bool:
    return (param.is_floating_point() or param.is_complex()) and param.itemsize > 1


def _alike(first: float, other: float, dtype: torch.dtype) -> bool:
    tolerated = min(_ROUNDINGS * torch.finfo(dtype).eps, _MOST)
    return math.isclose(first, other, rel_tol=tolerated) or (math.isnan(first) and math.isnan(other))


def _different_factors(own: Sent | None) -> str:
    told: list[str] = agree.gather_objects("none" if own is None else f"{own.arrived().item():.6g}")
    factors = ", ".join(f"{factor} on rank {rank}" for rank, factor in enumerate(told))
    return (
        f"the backward of the loss began with another factor on some ranks ({factors}). The loss that the model "
        "returns is that of the global batch, the same on all ranks: multiply it by the same number on all of them, or "
        "weight rows inside of the model"
    )
