"""What a ``GradScaler`` does to gradients of which some, or all, are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from pyrannc.errors import RaNNCError
from pyrannc.store.changes import Changes, left

UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""The operator by which it unscales gradients, in place, and finds out whether one is not finite."""


@dataclass(frozen=True)
class _Told:
    """What ranks have told each other of a model's gradients.

    Attributes:
        kinds: (3, parameters): true where a gradient has NaN, infinity, or minus infinity on some rank.
        places: of the parameters there, by ``id``.
        changes: what the script has done since to gradients of which other ranks have a part, or all, by ``id`` of the
            parameter.
    """

    kinds: Tensor
    places: dict[int, int]
    changes: dict[int, Changes] = field(default_factory=dict)

    def of(self, places: Iterable[int]) -> Tensor:
        """Kinds of some gradients, each in a row."""
        return torch.stack([self.kinds[:, place] for place in places])

    def overflow(self, params: Set[int]) -> list[Tensor]:
        """Flags, of which one is true where gradients of these parameters are not finite now."""
        known = params & self.places.keys()
        self._refuse_joined(known)
        self._refuse_doubt(known)
        unchanged = {self.places[param] for param in known - self.changes.keys()}
        alike: dict[Any, dict[int, Changes]] = {}
        for param in known & self.changes.keys():
            changes = self.changes[param]
            alike.setdefault(changes.key, {})[self.places[param]] = changes
        flags = [self.of(unchanged).any()] if unchanged else []
        return flags + [left(self.of(group), next(iter(group.values()))) for group in alike.values()]

    def _refuse_joined(self, params: Set[int]) -> None:
        joined = {self.changes[param].joined for param in params & self.changes.keys()} - {""}
        if joined:
            raise RaNNCError(
                "gradients of another backward were put into gradients that are divided, or on other ranks "
                f"({', '.join(sorted(joined))}): whether all of them are finite is known of the last backward only. "
                "Let loss.backward() add them up, without optimizer.zero_grad() between"
            )

    def _refuse_doubt(self, params: Set[int]) -> None:
        doubts = {self.places[param]: self.changes[param].doubt for param in params & self.changes.keys()}
        doubts = {place: doubt for place, doubt in doubts.items() if doubt}
        if doubts and self.of(doubts).any():
            raise RaNNCError(
                "gradients that are divided, or on other ranks, were not finite, and then the script changed them "
                f"({', '.join(sorted(set(doubts.values())))}): only where they are is known whether they are finite "
                "now. Call scaler.unscale_(optimizer) before the change"
            )


class Pending(Protocol):
    """Who knows of gradients that ranks have yet to sum."""

    def has_pending(self, params: Set[int]) -> bool:
        """True where some of them are of these parameters, by ``id``."""
        ...


_told: WeakKeyDictionary[object, _Told] = WeakKeyDictionary()
_pending: WeakSet[Pending] = WeakSet()


def tell_of_overflow(model: object, kinds: Tensor, places: dict[int, int]) -> None:
    """Notes whether gradients are not finite on some rank.

    Args:
        model: whose gradients they are; nothing is told any more once it is gone.
        kinds: (3, parameters): true where one has NaN, infinity, or minus infinity.
        places: of its parameters there that are trained, by ``id``; it is kept.
    """
    _told[model] = _Told(kinds, places)


def is_told(param: int) -> bool:
    """True for a parameter, by ``id``, that was trained at the last backward, and whose gradient is still there."""
    return any(param in told.places for told in _told.values())


def forget_overflow(params: Iterable[int]) -> None:
    """Gradients of parameters, by ``id``, have been dropped."""
    gone = [*params] if _told else []
    for told in _told.values():
        for param in gone:
            told.places.pop(param, None)


def changes_of(param: int, dtype: torch.dtype) -> list[Changes]:
    """Where changes of a gradient, of this type, of a parameter, by ``id``, are noted."""
    found = [told.changes for told in _told.values() if param in told.places]
    return [changes.setdefault(param, Changes(dtype, [])) for changes in found]


def watch_pending(pending: Pending) -> None:
    """From now on scalers refuse gradients that are pending and of which this rank has nothing, too."""
    _pending.add(pending)


def refuse_unsummed(call: str) -> NoReturn:
    """Raises of a call that needs the sums of gradients."""
    raise RaNNCError(
        f"{call} was called while ranks have not summed their gradients, after pyrannc.delay_grad_allreduce(True): "
        "call model.allreduce_grads() on all ranks before it, or set delay_grad_allreduce(False) before the last "
        "backward()"
    )


def refuse_scaler() -> NoReturn:
    """Raises where a scaler would judge gradients that are not summed."""
    refuse_unsummed("scaler.unscale_(optimizer), or scaler.step(optimizer),")


def unscale_own(
    func: Callable[..., Any], own: Sequence[Tensor], spread: Set[int], found: Tensor, scale: Tensor
) -> None:
    """Unscales the gradients of this rank.

    Args:
        func: the operator.
        own: what this rank has of the gradients.
        spread: ``id`` of the parameters of whose gradients other ranks have a part, or all.
        found: becomes 1 where one is not finite, on any rank.
        scale: to multiply them by.

    Raises:
        RaNNCError: nobody here can know whether one is finite, or ranks have yet to sum them.
    """
    if any(pending.has_pending(spread) for pending in _pending):
        refuse_scaler()
    flags = [flag.to(found.device) for told in _told.values() for flag in told.overflow(spread)]
    if own:
        func(list(own), found, scale)
    if flags:
        overflow = torch.stack(flags).any()
        found.copy_(torch.maximum(found, overflow.to(found.dtype).reshape(found.shape)))
