"""What calls count in what they leave beside the model's attributes, as it is after many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.holders import NOTHING
from pyrannc.capture.user.kinds import is_of_numpy
from pyrannc.capture.user.left import Beside

from .counted import Trial

_FAR = 720_720_000
"""Beyond every warm-up, and a multiple of whatever happens at every so many calls."""
_LONG = 50_400
"""Likewise, of items in a list that grows."""
CALLS = (None, 100, 10, 4)
"""After how many calls to look; ``None``: as many as nobody makes. After fewer where that cannot be, as what is counted
is a place in a buffer or a table."""


def after_calls(
    first: Sequence[Beside], second: Sequence[Beside], calls: int | None, trial: Trial | None = None
) -> list[Beside]:
    """What a late call finds where calls count: where two, one after another, have left other numbers, or more items.

    Args:
        first: what the first call leaves.
        second: what the next one leaves.
        calls: the number of the late one.
        trial: follows whole numbers in it.
    """
    found = [Beside(item.holder, dict(_counted(item, _again(item, second), calls, trial))) for item in first]
    return [item for item in found if item.values]


def is_out_of_range(error: BaseException | None) -> bool:
    """True for what a forward raises because so many calls cannot be, or what is counted has not so many places."""
    while error is not None and not isinstance(error, (LookupError, AssertionError)):
        error = error.__cause__
    return error is not None


def _again(item: Beside, second: Sequence[Beside]) -> dict[Any, Any]:
    """What the next call leaves in the same place."""
    own = (other for other in second if other.holder.owner is item.holder.owner)
    return next((other.values for other in own if type(other.holder) is type(item.holder)), {})


def _counted(item: Beside, again: dict[Any, Any], calls: int | None, trial: Trial | None) -> Iterator[tuple[Any, Any]]:
    for name in item.values.keys() & again.keys():
        leaves, form = pytree.tree_flatten(item.values[name])
        others, other_form = pytree.tree_flatten(again[name])
        if form == other_form and any(map(_counts, leaves, others)):
            late = [_late(value, other, calls, trial) for value, other in zip(leaves, others, strict=True)]
            yield name, pytree.tree_unflatten(late, form)
    if item.holder.is_ordered:
        places = [place for place, value in item.values.items() if isinstance(place, int) and value is not NOTHING]
        if places and again.keys() - range(places[-1] + 1):
            end = _LONG if calls is None else places[-1] + calls - 1
            if trial is not None:
                trial.follow_length(item.holder.owner)
            yield from ((place, item.values[places[-1]]) for place in range(places[-1] + 1, end))


def _counts(value: Any, again: Any) -> bool:
    is_number = type(value) in (int, float) or is_of_numpy(value, "number")
    return is_number and type(again) is type(value) and bool(value != again)


def _late(value: Any, again: Any, calls: int | None, trial: Trial | None) -> Any:
    """What a number is before a late call."""
    if not _counts(value, again):
        return value
    step = again - value
    if trial is not None and type(value) is int:
        return trial.counted(lambda call: value + (call - 2) * step)
    if calls is not None:
        return value + (calls - 2) * step
    # After the call it is that multiple.
    return (_FAR if step > 0 else -_FAR) - step
