"""What a capture took for granted, as data; ``call/guards.py`` checks it at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from pyrannc.capture.user.holders import Name
from pyrannc.capture.user.left import Unsets
from pyrannc.capture.user.source import Place
from pyrannc.errors import RaNNCError

from .global_reads import GlobalRead
from .lacking import Lacking


@dataclass(frozen=True)
class HeldBuffer:
    """A buffer of the model, as it stands there when it is read."""

    model: nn.Module = field(repr=False)
    name: str

    def now(self) -> Tensor:
        """The buffer itself."""
        return self.model.get_buffer(self.name).detach()

    @property
    def is_here(self) -> bool:
        """True where this rank has its contents."""
        return not isinstance(self.model.get_buffer(self.name), Lacking)


@dataclass(frozen=True)
class Question:
    """How to ask a question about data again.

    Attributes:
        ask: from the input tensors of a call to the tensors, of one element each, that decide; waits for no device.
        holds: whether the numbers in these tensors give the answer of the capture.
        takes: the input tensors that decide.
        buffers: likewise.
    """

    ask: Callable[[Sequence[Tensor]], list[Tensor]]
    holds: Callable[[Sequence[float]], bool]
    takes: frozenset[int]
    buffers: tuple[HeldBuffer, ...] = ()

    @property
    def is_known(self) -> bool:
        """True on a rank that can ask it."""
        return all(buffer.is_here for buffer in self.buffers)


@dataclass(frozen=True)
class Assumption:
    """An answer that depends on data and shaped the captured graph."""

    expr: str
    value: str
    where: Place
    assumed: bool = False
    """True when there was no data to ask (meta parameters) and the usual answer was taken."""
    question: Question | None = field(default=None, compare=False, repr=False)
    """None when other than inputs and buffers decides."""
    answer: Any = field(default=None, compare=False, repr=False)
    """What ``value`` is the text of."""
    advice: str = ""
    """What to do where a later call has another answer, if that is not what helps with others."""

    @property
    def decides(self) -> bool:
        """True for yes and no, False for a number that is computed with."""
        return self.value in ("True", "False")


class Assumes(IntEnum):
    """What answers are taken that others than the batch decide, each with those before."""

    NOTHING = 0
    OF_BUFFERS = 1
    """Later calls can ask again."""
    ANYTHING = 2
    """No later call can check them."""


class PartOfBatchError(RaNNCError):
    """The rows at hand cannot answer what the model asks for."""


@dataclass(frozen=True)
class Answering:
    """How questions about data are answered at a capture.

    Attributes:
        part_of_batch: there are more rows than those of the arguments.
        before: answers to take where the same is asked again.
        assumes: which answers that others than the batch decide are taken; the rest are errors.
        as_untraced: the model is not told that it is traced, but for what data go into.
        full_masks: where masks that choose elements are asked whether they choose all.
        multiple_of: the rows that are traced are a multiple of so many, where it is not 0: what divides these divides
            them, too, but so may what others have by chance.
    """

    part_of_batch: bool = False
    before: Sequence[Assumption] = ()
    assumes: Assumes = Assumes.ANYTHING
    as_untraced: bool = False
    full_masks: frozenset[Place] = frozenset()
    multiple_of: int = 0


FROM_ARGUMENTS = Answering()
"""The arguments are the whole batch."""


@dataclass(frozen=True)
class Attribute:
    """A Python attribute of a sub-module, or of an object that one holds.

    Attributes:
        module: whose.
        path: of the sub-module.
        where: it was written last.
        held: the attribute of the sub-module that the object is.
    """

    module: Any = field(repr=False)
    path: str
    name: str
    where: Place | None = None
    held: str = ""

    def __str__(self) -> str:
        owner = f"sub-module '{self.path}'" if self.path else "the model"
        return f'attribute "{self.held}{"." if self.held else ""}{self.name}" of {owner}'


@dataclass(frozen=True)
class PythonState:
    """What a captured call did with the Python attributes of the model.

    Attributes:
        read: what it asked for, there or not.
        written: what it set without having read it.
        unset: what stands elsewhere for what it left there.
        cached: where it left tensors that sizes alone decide.
        unseen: from where on it is not known what it left, as there is too much.
        globals: the global variables that code of the user reads, and attributes of objects in them.
        strangers: modules that it called and that are no sub-modules of the model.
        grad_mode: whether gradients were recorded, where it asked that; ``None`` where it did not.
    """

    read: list[Attribute]
    written: list[Attribute]
    unset: list[Unsets]
    cached: list[Name]
    unseen: Name | None
    globals: list[GlobalRead]
    strangers: list[nn.Module]
    grad_mode: bool | None
