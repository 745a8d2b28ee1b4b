"""The host sees where a GPU is inside of a replay, while it is there."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pyrannc.capture.torch_internals.devices import sleep_on_gpu
from pyrannc.capture.torch_internals.graphs import Graph
from pyrannc.core.program import Backward, Forward, RankProgram
from pyrannc.job import process
from pyrannc.job.faults import watchdog
from pyrannc.runtime.clock import Clock
from pyrannc.runtime.position import ActionRecord
from pyrannc.runtime.replay_place import place_word
from tests.gpu.loops import LOOPS, train
from tests.ranks import RankPool
from tests.runtime.plans import rank_programs
from tests.runtime.test_replay_place import Pair

Ranks = Callable[[int], RankPool]
CYCLES = 200_000_000
"""A tenth of a second."""


class Sampler(threading.Thread):
    """Reads a word again and again.

    Attributes:
        seen: what was there, without repetitions.
    """

    def __init__(self, word: torch.Tensor) -> None:
        super().__init__(daemon=True)
        self._word = word.numpy()
        self._over = threading.Event()
        self.seen: list[int] = []

    def run(self) -> None:
        while not self._over.is_set():
            number = int(self._word[0])
            if self.seen[-1:] != [number]:
                self.seen.append(number)
            time.sleep(1e-4)

    def stop(self) -> list[int]:
        """What was seen."""
        self._over.set()
        self.join()
        return self.seen


def _slept(program: RankProgram) -> tuple[list[str], list[str]]:
    """The places of a replay in all of which the GPU sleeps: as the host sees them, and as they are."""
    device = process.ensure_process_group().device
    record = ActionRecord(watchdog(), ["Stage 0", "Stage 1"])
    clock, graph, word = Clock(program, record, device), Graph(), place_word(record.watchdog, device)
    with torch.cuda.graph(graph), clock.graph(program.forward, 0):
        sleep_on_gpu(CYCLES)
        for index, action in enumerate(program.forward):
            record.enter(index)
            if isinstance(action, Forward | Backward):
                with clock.span("forward", action.microbatch):
                    sleep_on_gpu(CYCLES)
                sleep_on_gpu(CYCLES)
    clock.announce()
    clock.count_launch()
    sampler = Sampler(word)
    sampler.start()
    graph.replay()
    torch.cuda.synchronize()
    assert word.tolist() == [0]
    seen = [clock._names[number - clock._first] for number in sampler.stop() if number]
    graph.reset()
    clock.retire()
    process.barrier()
    return seen, [name for name in clock._names if name]


def test_each_place_is_seen_while_the_gpu_is_there(ranks: Ranks) -> None:
    (program, _) = rank_programs(Pair(), 8, 4, (1, 1), "whole")
    for seen, places in ranks(2).run(_slept, program):
        assert seen == places
        assert len(seen) == 17


def _trained(name: str) -> tuple[set[str], int]:
    """The places that are seen while a training replays its steps, and the word when all is done."""
    device = process.ensure_process_group().device
    names: dict[int, str] = {}
    announce = Clock.announce

    def note(clock: Clock) -> None:
        names.update(enumerate(clock._names, clock._first))
        announce(clock)

    word = place_word(watchdog(), device)
    sampler = Sampler(word)
    with patch.object(Clock, "announce", note):
        sampler.start()
        train(LOOPS[name], 300, "auto")
    torch.cuda.synchronize()
    return {names[number] for number in sampler.stop() if number}, int(word)


@pytest.mark.parametrize("name", ["Stages, loss inside", "Stages, loss outside"])
def test_a_training_is_seen_at_places_of_its_replays(name: str, ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", "RANNC_CUDA_GRAPHS": "auto", **LOOPS[name].env}
    for rank, (seen, last) in enumerate(ranks(2).run(_trained, name, env=env)):
        assert last == 0
        assert seen
        assert all(f"Stage {rank} (" in text for text in seen)


def test_a_death_names_the_place() -> None:
    bench = Path(__file__).parents[2] / "benches" / "death.py"
    command = [sys.executable, str(bench), "--spawn", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    # Rank 0 tells it as its own end, or as an error where it asks for rank 1 just then.
    assert re.search(r'rank 1 died while it was in .*, its GPU at ".*Stage 1 \(', ended.stderr), ended.stderr
