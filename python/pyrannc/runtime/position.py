"""What this rank is doing, for the message when the job has to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

from pyrannc._native import Watchdog
from pyrannc.core.program import (
    Action,
    AllGather,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Kind,
    Message,
    RankProgram,
    Recv,
    ReduceScatter,
    Send,
)


class ActionRecord:
    """Tells the watchdog each Action as it begins.

    Args:
        watchdog: ``None`` in a job of one rank.
        titles: by Stage, its name in messages.

    Attributes:
        watchdog: as given.
        index: of the Action that began last, among the forward ones and then the backward ones of its program.
    """

    _named: ClassVar[tuple[Watchdog, RankProgram] | None] = None
    """The program whose names the watchdog has; modules share a watchdog."""

    def __init__(self, watchdog: Watchdog | None, titles: Sequence[str]) -> None:
        self.watchdog = watchdog
        self._titles = titles
        self.index = 0

    @contextmanager
    def step(self, program: RankProgram) -> Iterator[None]:
        """The Actions of ``program`` are entered inside."""
        if self.watchdog is None:
            yield
            return
        named = ActionRecord._named
        if named is None or named[0] is not self.watchdog or named[1] is not program:
            actions = (*program.forward, *program.backward)
            title = self.title(program)
            around = [f"the exchange of inputs for {title}", f"the exchange of outputs of {title}"]
            around.append(f"the replay of all Actions of {title}")
            self.watchdog.program([*(describe(action, title) for action in actions), *around])
            ActionRecord._named = self.watchdog, program
        self.watchdog.enter(len(program.forward) + len(program.backward))
        try:
            yield
        except BaseException:
            self.watchdog.idle(failed=True)
            raise
        self.watchdog.idle()

    def enter(self, index: int) -> None:
        """The Action with this index begins."""
        self.index = index
        if self.watchdog is not None:
            self.watchdog.enter(index)

    def enter_outputs(self, program: RankProgram) -> None:
        """The exchange of outputs begins."""
        self.enter(len(program.forward) + len(program.backward) + 1)

    def enter_replay(self, program: RankProgram) -> None:
        """What has been recorded of the Actions is launched at once."""
        self.enter(len(program.forward) + len(program.backward) + 2)

    def title(self, program: RankProgram) -> str:
        """The name of the Stage whose program it is."""
        return self._titles[program.stage]


_CONTENTS: Mapping[Kind, str] = {
    "input": "inputs",
    "output": "outputs",
    "output_grad": "gradients of outputs",
    "input_grad": "gradients of inputs",
}


def replay_places(actions: Sequence[Action], computed: Sequence[int], stage: str) -> list[str]:
    """The places of a replay in words: what comes before its first computation, that, what comes then, and so on.

    Args:
        actions: what is replayed.
        computed: which of them compute something, by index.
        stage: its title.
    """
    names = []
    for before, behind in pairwise([-1, *computed, len(actions)]):
        if before >= 0:
            names.append(describe(actions[before], stage))
        names.append(_between(actions, before, behind, stage))
    return names


def _between(actions: Sequence[Action], before: int, behind: int, stage: str) -> str:
    """What there is between two computations: messages that leave, and those that the second one waits for."""
    second = actions[behind] if behind < len(actions) else None
    awaited = [
        _words(action)
        for index, action in enumerate(actions[:behind])
        if (_is_needed(action, second) if _comes_in(action) else isinstance(action, Send | Exchange) and index > before)
    ]
    if second is not None:
        name = f"what comes before {_words(second)}"
    else:
        name = f"what follows {_words(actions[before])}" if before >= 0 else "all Actions"
        # They start where their gradients are there, inside of backwards, and are waited for at the end.
        if any(isinstance(action, AllReduce | ReduceScatter) for action in actions):
            awaited.append("the end of all sums of gradients")
    return f"{name}, {stage}: {'; '.join(awaited)}" if awaited else f"{name}, {stage}"


def _comes_in(action: Action) -> bool:
    return isinstance(action, Recv) or (isinstance(action, Exchange) and action.kind in ("input", "output_grad"))


def _is_needed(action: Action, by: Action | None) -> bool:
    """True when a computation waits for a message that comes in."""
    if isinstance(action, Recv | Exchange) and isinstance(by, Forward | Backward | BackwardInput):
        is_of_forward = action.kind in ("value", "input")
        return action.microbatch == by.microbatch and is_of_forward == isinstance(by, Forward)
    return False


def describe(action: Action, stage: str) -> str:
    """An Action in words, with its Stage."""
    return f"{_words(action)}, {stage}"


def _words(action: Action) -> str:
    if isinstance(action, Forward):
        return f"forward of microbatch {action.microbatch}"
    if isinstance(action, Backward):
        return f"backward of microbatch {action.microbatch}"
    if isinstance(action, BackwardInput):
        return f"backward towards the inputs of microbatch {action.microbatch}"
    if isinstance(action, BackwardWeight):
        return f"backward towards the parameters of microbatch {action.microbatch}"
    if isinstance(action, Message):
        what = "values" if action.kind == "value" else "gradients"
        direction = "send to" if isinstance(action, Send) else "receive from"
        values = ", ".join(f"v{piece.value}" for piece in action.pieces)
        return f"{direction} rank {action.peer}: {what} {values} of microbatch {action.microbatch}"
    if isinstance(action, Exchange):
        peers = ", ".join(map(str, sorted({parcel.peer for parcel in (*action.sends, *action.recvs)})))
        return f"exchange of {_CONTENTS[action.kind]} of microbatch {action.microbatch} with ranks {peers}"
    if isinstance(action, AllGather):
        return f"gathering of parameters (bucket {action.bucket}, {action.bytes} bytes)"
    return f"sum of gradients (bucket {action.bucket}, {action.bytes} bytes)"
