"""The places of a replay: their names, and the word that tells where the GPU is; kernels and devices are stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from pyrannc._native import Watchdog
from pyrannc.core.program import Backward, Forward, RankProgram
from pyrannc.runtime import replay_place
from pyrannc.runtime.clock import Clock
from pyrannc.runtime.position import ActionRecord, replay_places
from pyrannc.runtime.replay_place import place_word
from tests.runtime.plans import rank_programs

CPU = torch.device("cpu")
TITLES = ["Stage 0 (0)", "Stage 1 (1)"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


class Replays:
    """Replays of a program, of which the marks are carried out at once.

    Attributes:
        watchdog: a stand-in.
        marked: what the marks write, in order.
    """

    def __init__(self, program: RankProgram) -> None:
        self.watchdog, self.marked = Mock(), list[int]()

        def mark(times: Tensor, row: Tensor, step: int, place: int, word: Tensor, number: int) -> None:
            row.copy_((row + step) % len(times))
            times[row, place] = len(self.marked)
            self.marked.append(number)

        with patch.dict(sys.modules, {"pyrannc.runtime.clock_triton": SimpleNamespace(mark=mark)}):
            record = ActionRecord(self.watchdog, TITLES)
            self.clock = Clock(program, record, CPU)
        self.clock.count_launch()
        for actions, first in ((program.forward, 0), (program.backward, len(program.forward))):
            if not actions:
                continue
            with self.clock.graph(actions, first):
                for index, action in enumerate(actions, first):
                    record.enter(index)
                    if isinstance(action, Forward | Backward):
                        with self.clock.span("forward", action.microbatch):
                            pass
        self.clock.announce()

    def names(self) -> list[str]:
        """What the watchdog would say at each mark; empty where no replay runs."""
        ((first, names),) = (call.args for call in self.watchdog.recorded.call_args_list)
        return ["" if number == 0 else names[number - first] for number in self.marked]


def _replays(stage: int, call: str, replicas: tuple[int, ...] = (1, 1)) -> Replays:
    programs = rank_programs(Pair(), 8, 4, replicas, call)
    return Replays(next(program for program in programs if program.stage == stage))


@pytest.fixture(autouse=True)
def shared_once() -> Iterator[None]:
    """What one test shares, or cannot share, is not the next one's."""
    replay_place._shared.cache_clear()
    with patch("torch.cuda.device", nullcontext), patch("torch.cuda.cudart"), patch("torch.cuda.check_error"):
        yield
    replay_place._shared.cache_clear()


MESSAGES_OF_THE_FIRST_STAGE = [
    "what comes before forward of microbatch 0, {}",
    "what comes before forward of microbatch 1, {}: send to rank 1: values v6 of microbatch 0",
    "what comes before forward of microbatch 2, {}: send to rank 1: values v6 of microbatch 1",
    "what comes before forward of microbatch 3, {}: send to rank 1: values v6 of microbatch 2",
    "what comes before backward of microbatch 0, {}: "
    "receive from rank 1: gradients v6 of microbatch 0; send to rank 1: values v6 of microbatch 3",
    "what comes before backward of microbatch 1, {}: receive from rank 1: gradients v6 of microbatch 1",
    "what comes before backward of microbatch 2, {}: receive from rank 1: gradients v6 of microbatch 2",
    "what comes before backward of microbatch 3, {}: receive from rank 1: gradients v6 of microbatch 3",
    "what follows backward of microbatch 3, {}",
]


def test_the_names_of_all_places_in_order() -> None:
    """Each message stands where it is waited for, not where it begins."""
    found = _replays(0, "whole").names()
    computations = [f"{kind} of microbatch {i}, {TITLES[0]}" for kind in ("forward", "backward") for i in range(4)]
    # The first mark compiles the kernel.
    assert found[0] == found[-1] == ""
    assert found[1:-1:2] == [text.format(TITLES[0]) for text in MESSAGES_OF_THE_FIRST_STAGE]
    assert found[2:-1:2] == computations


def test_a_criterion_outside_makes_two_replays() -> None:
    found = _replays(0, "halves").names()
    assert [place for place, name in enumerate(found) if not name] == [0, 10, 20]
    assert found[9] == f"what follows forward of microbatch 3, {TITLES[0]}: send to rank 1: values v6 of microbatch 3"
    assert found[11] == (
        f"what comes before backward of microbatch 0, {TITLES[0]}: receive from rank 1: gradients v6 of microbatch 0"
    )


def test_sums_are_waited_for_at_the_end() -> None:
    (found,) = {name for name in _replays(0, "whole", (2,)).names() if "sum" in name}
    assert found == f"what follows backward of microbatch 3, {TITLES[0]}: the end of all sums of gradients"


def test_a_replay_without_computations_has_a_place() -> None:
    (program, _) = rank_programs(Pair(), 8, 4, (1, 1), "whole")
    messages = [action for action in program.forward if not isinstance(action, Forward | Backward)]
    (name,) = replay_places(messages, [], TITLES[0])
    assert name.startswith(f"all Actions, {TITLES[0]}: send to rank 1")


def test_times_are_those_of_computations() -> None:
    clock = _replays(0, "halves").clock
    # The forwards' list begins with mark 1, the backwards' with mark 11; one row has all.
    assert clock._row.tolist() == [clock.row]
    spans = [(start, end) for _, _, start, end in clock.read(clock.row)]
    ticks = [round(end * 1000) for _, end in spans]
    assert ticks == [2, 4, 6, 8, 12, 14, 16, 18]
    assert all(round((end - start) * 1000) == 1 for start, end in spans)


def test_a_launch_once_more_takes_the_row_of_the_last() -> None:
    clock = _replays(0, "whole").clock
    last = clock.row
    clock.take_back_launch()
    assert clock._row.tolist() == [clock.row]
    assert clock.next_row == last
    rows = []
    for _ in range(len(clock._times)):
        clock.count_launch()
        rows.append(clock.row)
    assert rows[0] == last
    assert sorted(rows) == list(range(len(clock._times)))


def test_two_recordings_share_no_number() -> None:
    one, other = _replays(0, "whole"), _replays(1, "whole")
    assert not (set(one.marked) & set(other.marked)) - {0}
    one.clock.retire()
    ((first,),) = (call.args for call in one.watchdog.forgotten.call_args_list)
    assert first == one.marked[1]


def test_the_word_is_what_the_file_says() -> None:
    watchdog = Mock()
    word = place_word(watchdog, CPU)
    ((path,),) = (call.args for call in watchdog.follow.call_args_list)
    dog = Watchdog.listen(1, "127.0.0.1")
    for number in (7, 0, 1 << 20):
        word.fill_(number)
        with open(path, "rb") as file:
            assert int.from_bytes(file.read(4), sys.byteorder) == number
    # A later watchdog follows the same word.
    assert place_word(dog, CPU).data_ptr() == word.data_ptr()
    dog.close()


def test_without_a_word_to_share_nothing_is_followed() -> None:
    watchdog = Mock()
    place_word(None, CPU)
    with patch("torch.cuda.check_error", side_effect=RuntimeError("operation not supported")):
        assert place_word(watchdog, CPU).tolist() == [0]
    watchdog.follow.assert_not_called()


def test_a_watchdog_that_cannot_follow() -> None:
    watchdog = Mock()
    watchdog.follow.side_effect = FileNotFoundError("/proc")
    assert place_word(watchdog, CPU).tolist() == [0]
    assert place_word(Mock(), CPU).tolist() == [0]
