"""What this rank is doing, for the message when the job has to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

from pyrannc._native import Watchdog
from pyrannc.core.program import (
    Action,
    AllGather,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Kind,
    Message,
    RankProgram,
    Send,
)


class ActionRecord:
    """Tells the watchdog each Action as it begins.

    Args:
        watchdog: ``None`` in a job of one rank.
        titles: by Stage, its name in messages.
    """

    _named: ClassVar[tuple[Watchdog, RankProgram] | None] = None
    """The program whose names the watchdog has; modules share a watchdog."""

    def __init__(self, watchdog: Watchdog | None, titles: Sequence[str]) -> None:
        self._watchdog = watchdog
        self._titles = titles

    @contextmanager
    def step(self, program: RankProgram) -> Iterator[None]:
        """The Actions of ``program`` are entered inside."""
        if self._watchdog is None:
            yield
            return
        named = ActionRecord._named
        if named is None or named[0] is not self._watchdog or named[1] is not program:
            actions = (*program.forward, *program.backward)
            title = self._titles[program.stage]
            around = [f"the exchange of inputs for {title}", f"the exchange of outputs of {title}"]
            around.append(f"the replay of all Actions of {title}")
            self._watchdog.program([*(describe(action, title) for action in actions), *around])
            ActionRecord._named = self._watchdog, program
        self._watchdog.enter(len(program.forward) + len(program.backward))
        try:
            yield
        except BaseException:
            self._watchdog.idle(failed=True)
            raise
        self._watchdog.idle()

    def enter(self, index: int) -> None:
        """The Action with this index begins."""
        if self._watchdog is not None:
            self._watchdog.enter(index)

    def enter_outputs(self, program: RankProgram) -> None:
        """The exchange of outputs begins."""
        self.enter(len(program.forward) + len(program.backward) + 1)

    def enter_replay(self, program: RankProgram) -> None:
        """What has been recorded of the Actions is launched at once."""
        self.enter(len(program.forward) + len(program.backward) + 2)


_CONTENTS: Mapping[Kind, str] = {
    "input": "inputs",
    "output": "outputs",
    "output_grad": "gradients of outputs",
    "input_grad": "gradients of inputs",
}


def describe(action: Action, stage: str) -> str:
    """An Action in words."""
    if isinstance(action, Forward):
        return f"forward of microbatch {action.microbatch}, {stage}"
    if isinstance(action, Backward):
        return f"backward of microbatch {action.microbatch}, {stage}"
    if isinstance(action, BackwardInput):
        return f"backward towards the inputs of microbatch {action.microbatch}, {stage}"
    if isinstance(action, BackwardWeight):
        return f"backward towards the parameters of microbatch {action.microbatch}, {stage}"
    if isinstance(action, Message):
        what = "values" if action.kind == "value" else "gradients"
        direction = "send to" if isinstance(action, Send) else "receive from"
        values = ", ".join(f"v{piece.value}" for piece in action.pieces)
        return f"{direction} rank {action.peer}: {what} {values} of microbatch {action.microbatch}, {stage}"
    if isinstance(action, Exchange):
        peers = ", ".join(map(str, sorted({parcel.peer for parcel in (*action.sends, *action.recvs)})))
        return f"exchange of {_CONTENTS[action.kind]} of microbatch {action.microbatch} with ranks {peers}, {stage}"
    if isinstance(action, AllGather):
        return f"gathering of parameters (bucket {action.bucket}, {action.bytes} bytes), {stage}"
    return f"sum of gradients (bucket {action.bucket}, {action.bytes} bytes), {stage}"
