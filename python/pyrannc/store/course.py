"""What an optimizer has been asked to do, as far as all ranks must do the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_STEPS = "the number of calls of optimizer.step(), which a rank must not leave out or add by itself,"
_ZERO_GRAD = "optimizer.zero_grad() or model.zero_grad()"
_CLEARS = f"the number of backwards after which {_ZERO_GRAD} was called, which a rank must not do by itself,"
_IDLE = f"the number of steps right after {_ZERO_GRAD}, which a rank must not call by itself,"
_OF_RANKS = ("params", "param_names")
"""What every rank has its own of in a param group, while the optimizer steps."""
_NOTHING = object()


class _Backwards:
    """How often models have given their parameters gradients."""

    value: ClassVar[int] = 0


@dataclass
class Course:
    """What an optimizer has done since other ranks may hold what it lists.

    Attributes:
        steps: how often it has stepped.
        idle: how often since gradients were cleared, without a backward of a model between.
        clears: how often it has cleared gradients; once more without such a backward between does not count.
        set_by_steps: names of settings in its groups that a step has changed. A rank without parameters of a group may
            leave those of that group as they are.
    """

    steps: int = 0
    idle: int = 0
    clears: int = 0
    set_by_steps: set[str] = field(default_factory=set)
    _cleared: int = field(default_factory=lambda: _Backwards.value)
    _is_cleared: bool = False
    _before: Sequence[dict[str, Any]] = ()

    def told(self) -> list[tuple[str, int]]:
        """Each number that must be the same on all ranks, with what it is in words."""
        return [(_STEPS, self.steps), (_CLEARS, self.clears), (_IDLE, self.idle)]

    def begin_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """A step begins, with these groups."""
        self._before = [{**group} for group in groups]

    def end_step(self, groups: Iterable[dict[str, Any]]) -> None:
        """It has come to its end."""
        self.steps += 1
        self.idle += self._is_cleared and self._cleared == _Backwards.value
        for group, before in zip(groups, self._before, strict=False):
            own = [name for name in group if name not in _OF_RANKS]
            self.set_by_steps.update(name for name in own if _is_changed(group[name], before.get(name, _NOTHING)))
        self._before = ()

    def clear(self) -> None:
        """Gradients are cleared."""
        self.clears += self._cleared < _Backwards.value
        self._cleared, self._is_cleared = _Backwards.value, True


_courses: WeakKeyDictionary[Optimizer, Course] = WeakKeyDictionary()


def course_of(optimizer: Optimizer) -> Course:
    """The one of an optimizer."""
    found = _courses.get(optimizer)
    if found is None:
        found = _courses[optimizer] = Course()
    return found


def note_backward() -> None:
    """A model has given its parameters gradients, on all ranks."""
    _Backwards.value += 1


def _is_changed(now: Any, before: Any) -> bool:
    if now is before:
        return False
    try:
        return bool(now != before)
    except Exception:  # tensors that do not compare as one value
        return True
