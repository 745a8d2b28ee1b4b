"""Questions about data that the model asked at its capture, asked again for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrannc.call.sent import Sent
from pyrannc.capture import Assumption, Question
from pyrannc.errors import InputError

_OF_BATCH = "make every batch give that answer, or compute both ways and choose with torch.where"
_OF_NUMBER = "mask what lies beyond such a number, or cut tensors there before the call, at one length on all ranks"
_OF_BUFFER = (
    "compute with the buffer as a tensor, not as a Python number (of BatchNorm: give it a momentum), or choose with "
    "torch.where; a few answers of yes and no are followed where every rank has the buffer, as with one Stage"
)


@dataclass
class Answers:
    """The answers for one batch, on their way from the device.

    Attributes:
        asked: each question, and how many of the numbers belong to it.
        numbers: what is computed for all of them.
    """

    asked: list[tuple[Assumption, Question, int]]
    numbers: Sent
    checked: bool = False

    def check(self) -> None:
        """Raises InputError, once, when an answer is another one than at the capture; waits for the device."""
        if self.checked:
            return
        self.checked = True
        for assumption, question in self.others():
            names = ", ".join(f"'{name}'" for name in sorted({buffer.name for buffer in question.buffers}))
            asked, it = (f"buffer {names}", "it") if names else ("the batch", "this batch")
            raise InputError(
                f"{assumption.where} asks {asked} for {assumption.expr}, and {it} gives another answer "
                f"than {assumption.value}, with which the model was captured; "
                f"{assumption.advice or (_OF_BUFFER if names else _OF_BATCH if assumption.decides else _OF_NUMBER)}"
            )

    def others(self) -> Iterator[tuple[Assumption, Question]]:
        """Those that have another answer than at the capture; waits for the device."""
        rest = self.numbers.arrived().tolist()
        for assumption, question, count in self.asked:
            own, rest = rest[:count], rest[count:]
            if not question.holds(own):
                yield assumption, question


class DataGuards:
    """The questions of one captured call that inputs and buffers decide.

    Args:
        assumptions: of the call.
        device: where the batch is; answers on the host's processor are there at once.
        waits: answers are needed before the call runs, because it changes buffers.

    Attributes:
        takes: the input tensors that decide.
        of_buffers: buffers decide too; where they say otherwise, another capture may serve the call.
    """

    def __init__(self, assumptions: Sequence[Assumption], device: torch.device, *, waits: bool) -> None:
        self._questions = [(item, item.question) for item in assumptions if item.question is not None]
        self.unchecked = [item for item in assumptions if item.question is None]
        self.of_buffers = any(question.buffers for _, question in self._questions)
        self.waits = waits or self.of_buffers or device.type == "cpu"
        self.takes = frozenset(place for _, question in self._questions for place in question.takes)

    @property
    def known(self) -> bool:
        """True on a rank that can ask all of them."""
        return all(question.is_known for _, question in self._questions)

    def __bool__(self) -> bool:
        return bool(self._questions)

    @torch.no_grad()
    def ask(self, tensors: Sequence[Tensor]) -> Answers:
        """Starts to compute the answers for the input tensors of a call, with the rows of the global batch."""
        # Whoever holds the buffers asks for all.
        known = [(assumption, question) for assumption, question in self._questions if question.is_known]
        found = [question.ask([tensor.detach() for tensor in tensors]) for _, question in known]
        if not found:
            return Answers([], Sent(torch.empty(0, device="cpu")))
        numbers = torch.stack([number.reshape(()).double() for group in found for number in group])
        counted = zip(known, found, strict=True)
        asked = [(assumption, question, len(group)) for (assumption, question), group in counted]
        return Answers(asked, Sent(numbers))
