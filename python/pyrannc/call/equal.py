"""What must have the same value on all ranks for a call, as numbers that ranks can compare."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pyrannc.capture.contents import contents

SMALL_BYTES = 4096
"""Tensors on the host up to here are compared at each call."""
_OF_RANKS = ("params", "param_names")
"""What every rank has its own of in a param group."""
EVERY = 100
"""All others are compared at a captured form's first call, and whenever this many calls have passed."""
_STEPS = "the number of calls of optimizer.step(), which a rank must not leave out or add by itself,"

Fingerprint = tuple[str, int]
"""What it is, in words, and its number."""


class HyperParameters:
    """Learning rates and the like, read again only when one has changed.

    Args:
        steps: how often the optimizer has stepped.
    """

    def __init__(self, optimizer: Optimizer | None, steps: Callable[[Optimizer], int]) -> None:
        self._optimizer = optimizer
        self._steps = steps
        self._seen: list[list[tuple[str, Any]]] = []
        self._found: list[Fingerprint] = []

    def fingerprints(self) -> list[Fingerprint]:
        """Each that is a Python value, and the number of steps."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        now = [[(name, _value(group[name])) for name in group if name not in _OF_RANKS] for group in groups]
        if not _equal(now, self._seen):
            self._seen = now
            self._found = [
                (f'"{name}" of group {place} of the optimizer\'s param_groups', zlib.crc32(repr(value).encode()))
                for place, settings in enumerate(now)
                for name, value in settings
                if isinstance(value, (bool, int, float, str, type(None), tuple))
            ]
        if self._optimizer is None:
            return self._found
        return [*self._found, (_STEPS, self._steps(self._optimizer))]


def _value(setting: Any) -> Any:
    """A setting as a Python value that shows when it changes in place.

    Tensors on a GPU stay as they are: reading them would wait for it.
    """
    if isinstance(setting, Tensor) and setting.numel() == 1 and setting.device.type == "cpu":
        return setting.item()
    return tuple(map(_value, setting)) if isinstance(setting, (tuple, list)) else setting


def _equal(now: Any, seen: Any) -> bool:
    try:
        return bool(now == seen)
    except Exception:  # tensors that do not compare as one value
        return False


def whole_inputs(
    tensors: Sequence[Tensor], names: Callable[[], Sequence[str]], per_row: Sequence[int], calls: int
) -> list[Fingerprint]:
    """Tensors without rows among the arguments; reading those of a GPU waits for it.

    Args:
        names: of the tensors; not asked for when there is nothing to compare.
        calls: of this captured form so far.
    """

    def is_compared(tensor: Tensor) -> bool:
        small = tensor.device.type == "cpu" and tensor.nbytes <= SMALL_BYTES
        return (small or calls % EVERY == 0) and tensor.device.type != "meta"

    marked = zip(tensors, per_row, strict=True)
    compared = [place for place, (tensor, count) in enumerate(marked) if not count and is_compared(tensor)]
    told = names() if compared else ()
    return [(f"argument {told[place]}", digest(tensors[place])) for place in compared]


def combined(found: Sequence[Fingerprint]) -> int:
    """All of them as one number."""
    return zlib.crc32(repr([number for _, number in found]).encode()) if found else 0


def digest(tensor: Tensor) -> int:
    """The contents as a number; reading those of a GPU waits for it."""
    return zlib.crc32(contents(tensor))


def names_inside(place: str, item: Any) -> Iterator[str]:
    """The place of each tensor in an argument and in containers there."""
    if isinstance(item, Tensor):
        yield place
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from names_inside(f"{place}[{key!r}]", value)
    elif isinstance(item, (list, tuple)):
        for index, value in enumerate(item):
            yield from names_inside(f"{place}[{index}]", value)
