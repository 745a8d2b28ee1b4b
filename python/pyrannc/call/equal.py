"""What must have the same value on all ranks for a call, as numbers that ranks can compare."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from pyrannc.capture.user.contents import contents

SMALL_BYTES = 4096
"""Tensors on the host up to here are compared at each call."""
_OF_RANKS = ("params", "param_names")
"""What every rank has its own of in a param group."""
EVERY = 100
"""All others are compared at a captured form's first call, and whenever this many calls have passed."""

Fingerprint = tuple[str, int]
"""What it is, in words, and its number."""


class Course(Protocol):
    """What is known of the calls of an optimizer's methods."""

    set_by_steps: set[str]
    """Names of settings in its groups that a step has changed: some ranks may step without a group."""

    def told(self) -> list[Fingerprint]:
        """The number of these calls, as far as it must be the same on all ranks."""
        ...


class HyperParameters:
    """Learning rates and the like, read again only when one has changed, and how often optimizers were called.

    Args:
        optimizer: the model's.
        course: of an optimizer.
    """

    def __init__(self, optimizer: Optimizer | None, course: Callable[[Optimizer], Course]) -> None:
        self._course = course
        self._read = [] if optimizer is None else [_Read(optimizer, course(optimizer), "the optimizer")]
        self._numbers = itertools.count(len(self._read))
        self._left_out: frozenset[str] = frozenset()

    def watch(self, optimizer: Optimizer) -> None:
        """From now on another optimizer counts too. All ranks call it."""
        if not any(read.is_of(optimizer) for read in self._read):
            number = next(self._numbers)
            words = f"{type(optimizer).__name__}, an optimizer that RaNNCModule was not given (number {number}),"
            self._read.append(_Read(optimizer, self._course(optimizer), words))

    def forget(self, course: Course) -> None:
        """No rank has the optimizer of this course any more. All ranks call it."""
        self._read = [read for read in self._read if read.course is not course]

    def fingerprints(self) -> list[Fingerprint]:
        """Each that is a Python value, and the number of calls."""
        return [found for read in self._read for found in read.fingerprints(self._left_out)]

    def set_by_steps(self) -> frozenset[str]:
        """Those that are not the script's, in words."""
        return frozenset(words for read in self._read for words in read.set_by_steps())

    def leave_out(self, words: frozenset[str]) -> None:
        """From now on these do not count."""
        self._left_out |= words


class _Read:
    """What has been read of an optimizer; of one that is gone it stays, as it may still be there on other ranks."""

    def __init__(self, optimizer: Optimizer, course: Course, words: str) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._groups = optimizer.param_groups
        self.course = course
        self._words = words
        self._seen: list[list[tuple[str, Any]]] = []
        self._found: list[Fingerprint] = []

    def is_of(self, optimizer: Optimizer) -> bool:
        return self._optimizer() is optimizer

    def fingerprints(self, left_out: frozenset[str]) -> list[Fingerprint]:
        optimizer = self._optimizer()
        if optimizer is not None:
            self._groups = optimizer.param_groups
        now = [[(name, _value(group[name])) for name in group if name not in _OF_RANKS] for group in self._groups]
        if not _equal(now, self._seen):
            self._seen = now
            self._found = [
                (self._of_group(name, place), zlib.crc32(repr(value).encode()))
                for place, settings in enumerate(now)
                for name, value in settings
                if isinstance(value, (bool, int, float, str, type(None), tuple))
            ]
        found = [(words, number) for words, number in self._found if words not in left_out] if left_out else self._found
        return [*found, *((f"{words} of {self._words}", number) for words, number in self.course.told())]

    def set_by_steps(self) -> Iterator[str]:
        for place in range(len(self._groups)):
            for name in self.course.set_by_steps:
                yield self._of_group(name, place)

    def _of_group(self, name: str, place: int) -> str:
        whose = "the optimizer's param_groups" if self._words == "the optimizer" else f"param_groups of {self._words}"
        return f'"{name}" of group {place} of {whose}'


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
