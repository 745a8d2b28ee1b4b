"""Which runs are recorded, and where to, without a GPU: graphs and their memory are stand-ins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from pyrannc.runtime import recording
from pyrannc.runtime.cuda_graph import Places
from pyrannc.runtime.recording import Recordings

ROWS = ((0, 4),)


class Graphs:
    """What torch does with the pools of graphs: one whose graphs are all gone takes no other, as cuBLAS keeps memory in
    it. A graph that cannot begin leaves torch on its stream.

    Attributes:
        stream: torch's current one.
        used: graphs by pool.
        failing: so many do not begin.
        is_full: nothing but graphs has memory left.
        is_running: a replay may not have ended.
        held_bytes: by tensors, now.
        most_bytes: likewise, the most until now.
        blocks: with what block each recording was to begin.
    """

    def __init__(self) -> None:
        self.stream: object = "own"
        self.is_full = self.is_running = False
        self.held_bytes = self.most_bytes = 100
        self.used: Counter[int] = Counter()
        self.failing = 0
        self.blocks: list[int] = []

    def begin(self, pool: int) -> None:
        self.stream = "of recordings"
        if self.failing:
            self.failing -= 1
            raise RuntimeError("an operation is not permitted")
        if pool in self.used and not self.used[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.used[pool] += 1
        self.stream = "own"
        self.most_bytes = max(self.most_bytes, self.held_bytes + 50)
        self.held_bytes += 10


class FakeRecording:
    """A recording of nothing."""

    graphs: Graphs
    output_bytes = 3

    def __init__(
        self, task: Any, inputs: Any, inside: Any, current: Any, seen: Any, pool: int, block_bytes: int
    ) -> None:
        del inputs, inside, seen
        self.graphs.blocks.append(block_bytes)
        self.task, self.current, self.pool = task, current, pool
        self.graphs.begin(pool)
        self.found = list(task.context.addresses)

    @property
    def is_stale(self) -> bool:
        return bool(self.found != self.task.context.addresses)

    def serves(self, inputs: Any, inside: Any) -> bool:
        del inputs, inside
        return True

    def room_for_outputs(self) -> dict[int, torch.Tensor]:
        if self.graphs.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {}

    def reset(self) -> None:
        assert not self.graphs.is_running, "what a replay reads and writes would be given to others"
        self.graphs.held_bytes -= 10
        self.graphs.used[self.pool] -= 1


class Watched:
    """A run in which nothing waits, and that grows by as much."""

    def __init__(self, known: Any, *_: Any) -> None:
        known.watched = True
        known.seen.growth_bytes = 40


class Replay:
    """Of a recording."""

    def __init__(self, recording: FakeRecording, *_: Any) -> None:
        recording.graphs.is_running = True


class Caller:
    """Who a call is for."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open


class Stage:
    """One rank's, whose program is run again and again."""

    def __init__(self) -> None:
        self.addresses, self.codes = [0], [object()]
        gradients = Mock(new_set=lambda: SimpleNamespace(is_held=False))
        gradients.delivery.is_about_to_give.return_value = False
        code = SimpleNamespace(compiled_for=lambda _: list(self.codes))
        self.context = Mock(
            addresses=self.addresses, code=code, gradients=gradients, device=torch.device("cpu"), tail=None
        )
        program = SimpleNamespace(call="whole", rows=ROWS)
        self.task: Any = SimpleNamespace(context=self.context, program=program, reduce=True)
        self.recordings = Recordings()

    def step(self, caller: Any = None) -> type[Any]:
        """What carries out the next call."""
        caller = caller or Caller(is_open=False)
        variant: Any = SimpleNamespace(whole_part="", whole=Mock(facts=Mock(outputs=())))
        return type(self.recordings.run(caller, variant, self.task, {}, {}, None))


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """Stand-ins for what needs a GPU."""
    made, pools = Graphs(), count()
    FakeRecording.graphs = made

    def set_stream(stream: object) -> None:
        made.stream = stream

    def synchronize() -> None:
        made.is_running = False

    cuda: dict[str, Any] = {
        "graph_pool_handle": lambda: next(pools),
        "current_stream": lambda _: made.stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _: 60 * sum(made.used.values()),
        "memory_allocated": lambda _: made.held_bytes,
        "max_memory_allocated": lambda _: made.most_bytes,
    }
    with (
        patch.multiple(recording, Recording=FakeRecording, Replay=Replay, WatchedRun=Watched, before_groups_end=Mock()),
        patch.multiple(torch.cuda, **cuda),
    ):
        yield made


def test_a_run_is_watched_and_then_replayed(graphs: Graphs) -> None:
    stage = Stage()
    assert [stage.step() for _ in range(4)] == [Watched, Replay, Replay, Replay]
    assert list(graphs.used.values()) == [1]


def test_a_run_is_not_replayed_where_its_outputs_have_no_memory_beside_the_graphs(graphs: Graphs) -> None:
    stage = Stage()
    assert [stage.step() for _ in range(2)] == [Watched, Replay]
    graphs.is_full = True
    assert [stage.step() for _ in range(3)] == [type(None)] * 3
    assert list(graphs.used.values()) == [0, 0]
    assert "there is no memory" in str(stage.recordings)


@pytest.mark.parametrize(("before", "expected"), [(0, 43), (5000, 53)])
def test_what_replays_take_is_known_from_their_recording(graphs: Graphs, before: int, expected: int) -> None:
    """A higher peak before it leaves the size of its memory, which is no less. What a replay gives is copied."""
    stage = Stage()
    graphs.most_bytes += before
    assert [stage.step() for _ in range(2)] == [Watched, Replay]
    assert stage.recordings.replay_bytes == expected
    stage.recordings.drop()
    assert stage.recordings.replay_bytes == 0


def test_nothing_is_recorded_while_a_watched_backward_is_to_come(graphs: Graphs) -> None:
    stage = Stage()
    stage.task.program.call = "halves"
    late = Caller(is_open=True)
    assert [stage.step(late), stage.step(late)] == [Watched, Watched]
    late.is_open = False
    assert stage.step() is Replay
    assert list(graphs.used.values()) == [1]


def test_graphs_go_once_they_have_run(graphs: Graphs) -> None:
    stage = Stage()
    ends = [lambda: stage.recordings.forget(stage.context), stage.recordings.forget_all, stage.recordings.drop]
    for end in ends:
        while stage.step() is not Replay:
            pass
        assert graphs.is_running
        end()
        assert not graphs.is_running


def test_what_was_one_input_may_be_two_later() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    places = Places({0: one, 1: one})
    places.take({0: one, 1: other})
    assert torch.equal(places.tensors[0], one)
    assert torch.equal(places.tensors[1], other)


def test_moved_parameters_are_recorded_in_other_memory(graphs: Graphs) -> None:
    stage = Stage()
    assert [stage.step() for _ in range(2)] == [Watched, Replay]
    stage.addresses[0] = 1
    assert [stage.step() for _ in range(2)] == [Replay, Replay]
    assert list(graphs.used.values()) == [0, 1]


def test_spans_that_were_compiled_since_are_recorded_in_other_memory(graphs: Graphs) -> None:
    stage = Stage()
    assert [stage.step() for _ in range(2)] == [Watched, Replay]
    stage.codes[0] = object()
    assert [stage.step() for _ in range(3)] == [Watched, Replay, Replay]
    assert list(graphs.used.values()) == [0, 1]


def test_programs_of_which_one_is_recorded_anew_share_memory(graphs: Graphs) -> None:
    stage = Stage()
    first = stage.task
    second = SimpleNamespace(**{**vars(first), "program": SimpleNamespace(call="whole", rows=ROWS)})
    for task in (first, second):
        stage.task = task
        assert [stage.step() for _ in range(2)] == [Watched, Replay]
    stage.addresses[0] = 1
    for task in (first, second):
        stage.task = task
        assert stage.step() is Replay
    assert list(graphs.used.values()) == [2]


def test_what_failed_once_is_recorded_the_next_time(graphs: Graphs) -> None:
    stage, graphs.failing = Stage(), 1
    assert [stage.step() for _ in range(2)] == [Watched, type(None)]
    assert graphs.stream == "own"
    assert [stage.step() for _ in range(2)] == [Replay, Replay]
    assert graphs.blocks == [0, 40]


def test_what_fails_twice_is_given_up(graphs: Graphs) -> None:
    stage, graphs.failing = Stage(), 2
    assert [stage.step() for _ in range(4)] == [Watched, type(None), type(None), type(None)]
    assert graphs.stream == "own"
    assert "recording failed: RuntimeError: an operation is not permitted" in str(stage.recordings)
