"""Whole numbers that calls count, followed through what a forward asks of them: later calls may get other answers."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyrannc.capture.torch_internals.patching import PatchPoint

_LEN = PatchPoint(builtins, "len")
_MOST_CALLS = 5_000
"""So many are looked at."""
_MOST_TRIALS = 3
"""So many are tried: of what no two calls have alike, as the name of a file, these stand for all."""
_FIRST = 3
"""The first call that has not been traced."""

_OF_TWO = "add sub mul floordiv truediv mod pow lshift rshift and or xor"
_OTHERS = "eq ne lt le gt ge neg pos abs invert"
_WHOLE = "int index round trunc floor ceil"
"""Names of operators: the first ones also stand between another number and this one."""

OfCall = Callable[[int], Any]
"""What something is in a call with a number."""


class Trial:
    """What the forward has asked in one call, with the answers.

    Args:
        call: its number.

    Attributes:
        follows: there are numbers of which it might have asked.
    """

    def __init__(self, call: int) -> None:
        self.call = call
        self.follows = self.is_over = False
        self._asked: list[tuple[OfCall, Any]] = []
        self._growing: list[Any] = []

    def follow_length(self, container: Any) -> None:
        """Follows the length of a container that each call gives one more item."""
        self.follows = True
        self._growing.append(container)

    @contextmanager
    def lengths_followed(self) -> Iterator[None]:
        """While active, the lengths of these are numbers that are followed."""
        original = _LEN.original

        def length(item: Any, /) -> int:
            found: int = original(item)
            if not any(item is container for container in self._growing):
                return found
            return Counted(lambda call: found + call - self.call, self)

        with _LEN.replaced_by(length):
            yield

    def counted(self, of: OfCall) -> Counted:
        """A number to be followed, by what it is in which call."""
        self.follows = True
        return Counted(of, self)

    def note(self, of: OfCall, answer: Any) -> None:
        """Notes a question."""
        if not self.is_over:
            self._asked.append((of, answer))

    def stands_for(self, call: int) -> bool:
        """True for a call that gets the same answers, and goes the same way on their account."""
        return all(_is_answered(of, call, answer) for of, answer in self._asked)


def trials() -> Iterator[Trial]:
    """One after another, each for the first call that none before stands for."""
    done = list[Trial]()
    for call in range(_FIRST, _MOST_CALLS):
        if not any(trial.stands_for(call) for trial in done):
            trial = Trial(call)
            yield trial
            trial.is_over = True
            done.append(trial)
            if len(done) == _MOST_TRIALS or not trial.follows:
                return


class Counted(int):
    """A whole number that is another one in each call.

    Args:
        of: what it is in which call.
        trial: is told what is asked of it.
    """

    of: OfCall
    _trial: Trial

    def __new__(cls, of: OfCall, trial: Trial) -> Counted:
        """Makes it for the call of the trial."""
        made = super().__new__(cls, of(trial.call))
        made.of, made._trial = of, trial
        return made

    def __reduce__(self) -> Any:
        return int, (self._plain(),)

    def __bool__(self) -> bool:
        return bool(self.calculated(bool))

    def __float__(self) -> float:
        return float(self.told(float))

    def __hash__(self) -> int:
        return int(self.told(hash))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def _plain(self) -> int:
        return int.__add__(self, 0)

    def calculated(self, function: Callable[..., Any], *others: Any) -> Any:
        """What a function makes of it: one such, if that is a whole number; any other is an answer."""
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        of, mine = [_of(other) for other in others], self.of

        def made(call: int) -> Any:
            return function(mine(call), *(other(call) for other in of))

        result = made(self._trial.call)
        if type(result) is int:
            return Counted(made, self._trial)
        self._trial.note(made, result)
        return result

    def told(self, function: Callable[[int], Any]) -> Any:
        """What a function makes of it, where that tells the number."""
        self._trial.note(self.of, self._plain())
        return function(self._plain())


def _of(number: Any) -> OfCall:
    return number.of if isinstance(number, Counted) else lambda call: number


def _is_answered(of: OfCall, call: int, answer: Any) -> bool:
    try:
        return bool(of(call) == answer)
    except ArithmeticError:
        return False


def _calculating(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda number, *others: number.calculated(function, *others)


def _turned(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda one, other: function(other, one)


def _telling(function: Callable[[int], Any]) -> Callable[..., Any]:
    return lambda number, *_: number.told(function)


def _follow_operators() -> None:
    """Gives such numbers the operators of others."""
    for name in (*_OF_TWO.split(), *_OTHERS.split()):
        setattr(Counted, f"__{name}__", _calculating(getattr(operator, f"__{name}__")))
    for name in _OF_TWO.split():
        setattr(Counted, f"__r{name}__", _calculating(_turned(getattr(operator, f"__{name}__"))))
    for name in _WHOLE.split():
        setattr(Counted, f"__{name}__", _telling(int))


_follow_operators()
