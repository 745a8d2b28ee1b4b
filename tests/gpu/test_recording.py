"""Replayed steps are those that they stand for, to the last bit, dropout included."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyrannc
from pyrannc.capture.torch_internals.graphs import Graph
from pyrannc.job import process
from pyrannc.runtime import recording
from pyrannc.runtime.cuda_graph import Recording
from tests.gpu.loops import KEPT_AS_THEY_ARE, LOOPS, SAME, Loop, Products, Trained, Words, train
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _job(name: str, steps: int, graphs: str) -> Trained:
    return train({**LOOPS, **KEPT_AS_THEY_ARE}[name], steps, graphs)


def _both(
    ranks: Ranks, loops: dict[str, Loop], name: str, steps: int, job: Callable[[str, int, str], Trained] = _job
) -> tuple[list[Trained], list[Trained]]:
    common = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", **loops[name].env}
    off, replayed = (
        ranks(2).run(job, name, steps, graphs, env={**common, "RANNC_CUDA_GRAPHS": graphs})
        for graphs in ("off", "auto")
    )
    return off, replayed


def _differences(off: list[Trained], replayed: list[Trained]) -> list[str]:
    found = []
    for rank, (one, other) in enumerate(zip(off, replayed, strict=True)):
        losses = zip(one.losses, other.losses, strict=True)
        found += [f"loss {step} on rank {rank}" for step, (loss, again) in enumerate(losses) if loss != again]
        found += [f"{key} on rank {rank}" for key in one.state if not torch.equal(one.state[key], other.state[key])]
    return found


@pytest.mark.parametrize("name", list(LOOPS))
def test_replayed_training(name: str, ranks: Ranks) -> None:
    off, replayed = _both(ranks, LOOPS, name, 9)
    assert _differences(off, replayed) == []
    # Otherwise it is told by rank.
    assert replayed[0].recorded.startswith("1 of 1 kinds of steps are replayed")


@pytest.mark.parametrize("name", ["plain, loss inside", "plain, loss outside"])
def test_gradients_have_memory_once(name: str, ranks: Ranks) -> None:
    _, replayed = _both(ranks, LOOPS, name, 3)
    assert [trained.gradient_sets for trained in replayed] == [1, 1]


@pytest.mark.parametrize(
    "name", ["Stages, loss inside", "Stages, loss outside", "ZeRO 3, loss outside", "ZeRO 3 kept, loss inside"]
)
def test_a_thousand_replays(name: str, ranks: Ranks) -> None:
    off, replayed = _both(ranks, LOOPS, name, 1000)
    assert _differences(off, replayed) == []


@pytest.mark.parametrize("name", list(KEPT_AS_THEY_ARE))
def test_what_no_graph_can_hold(name: str, ranks: Ranks) -> None:
    off, carried_out = _both(ranks, KEPT_AS_THEY_ARE, name, 5)
    assert _differences(off, carried_out) == []
    assert "0 of 1 kinds of steps are replayed" in carried_out[0].recorded
    assert "because" in carried_out[0].recorded


CYCLES = 1 << 31
"""About a second, in which a step is recorded."""


def _on_a_late_stream(name: str, steps: int, graphs: str) -> Trained:
    """What torch does unrecorded on the stream of a recording falls into the first replay, unless that waits for it."""
    begin = Graph.capture_begin

    def late(graph: Graph, *args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(CYCLES)
        begin(graph, *args, **kwargs)
        torch.cuda._sleep(CYCLES)

    with patch.object(Graph, "capture_begin", late):
        return _job(name, steps, graphs)


@pytest.mark.parametrize("name", ["zeroed_between, loss inside", "zeroed_between, loss outside"])
def test_first_replays_draw_as_the_others(name: str, ranks: Ranks) -> None:
    assert _differences(*_both(ranks, LOOPS, name, 4, _on_a_late_stream)) == []


def _one_after_another() -> list[str]:
    """What two models say of their graphs, while the script still has a loss of the first one."""
    device, told = process.ensure_process_group().device, []
    loss = torch.zeros(())
    for _ in range(2):
        module = Products().to(device)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = pyrannc.RaNNCModule(module, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4, dtype=torch.int64, device=device)).square().mean()
            loss.backward()
            optimizer.step()
        told.append(model.report().recorded)
        del model, optimizer, module
        gc.collect()
    assert loss.isfinite()
    pyrannc.barrier()
    return told


def test_a_model_after_one_whose_loss_is_held(ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}
    for told in ranks(2).run(_one_after_another, env=env):
        assert [text[:6] for text in told] == ["1 of 1", "1 of 1"]


def _peaks() -> tuple[int, int, int]:
    """The allocator's peak with the recording of a step, that of replays alone, and what the report says of these."""
    device = process.ensure_process_group().device
    module = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(module, optimizer)
    peaks = []
    for steps in (5, 4):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(8192, 512, device=device)).square().mean().backward()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated())
    told = model.report().ranks[pyrannc.get_rank()].peak_bytes.measured
    assert told is not None
    return peaks[0], peaks[1], int(told)


def test_peaks_count_replays(ranks: Ranks) -> None:
    for recorded, replayed, told in ranks(2).run(_peaks, env={"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off"}):
        assert replayed < 0.8 * recorded
        assert told == pytest.approx(recorded, rel=0.1)


class Twice(Words):
    """Gives its logits beside the loss."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = Words.forward(self, ids)
        assert labels is not None, "it has its loss inside"
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def _held_by_graphs() -> int:
    return sum(one["total_size"] for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) != (0, 0))


def _after_failures(count: int) -> tuple[str, list[float], int, int]:
    """Of a training whose first recordings find no memory: the report, losses, what graphs hold, a step's growth."""
    device = process.ensure_process_group().device
    # Graphs of the run before go first.
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    module = Twice(True).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model: Any = pyrannc.RaNNCModule(module, optimizer)
    generator, losses, growths, left = torch.Generator().manual_seed(1), [], [], count
    record, before = recording.Recording, _held_by_graphs()

    def short(*args: Any) -> Recording:
        nonlocal left
        if left:
            left -= 1
            raise torch.OutOfMemoryError("no memory for it")
        growths.append(args[4].growth_bytes)
        return record(*args)

    with patch.object(recording, "Recording", short):
        for _ in range(6):
            ids, labels = torch.randint(100, (2, 256, 512), generator=generator).to(device)
            optimizer.zero_grad()
            loss, _ = model(ids, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.report().recorded, losses, _held_by_graphs() - before, sum(growths)


def test_what_finds_no_room_in_pieces_is_recorded_in_one_block(ranks: Ranks) -> None:
    env = {"RANNC_PROFILE": "never", "RANNC_COMPILE_SPANS": "off", "RANNC_PIPELINE_NUM": "4"}
    # What cuBLAS takes at the first one stays.
    found = [ranks(1).run(_after_failures, count, env=env)[0] for count in (0, 0, 1, 2)]
    _, (first, losses, in_pieces, growth), (second, again, in_block, _), (never, as_before, nothing, _) = found
    # The sums of the word table come in any order.
    assert again == pytest.approx(losses, rel=1e-5)
    assert as_before == pytest.approx(losses, rel=1e-5)
    assert first.startswith("1 of 1 kinds of steps are replayed")
    assert second.startswith("1 of 1 kinds of steps are replayed")
    assert never.startswith("0 of 1 kinds of steps are replayed")
    assert "no memory for it" in never
    assert nothing == 0
    assert 0.9 * growth < in_block < in_pieces


def _same(inside: bool, place: int, graphs: str) -> Trained:
    return train(SAME[inside][place], 6, graphs)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_and_parted_training(inside: bool, ranks: Ranks) -> None:
    def trained(place: int, loop: Loop, graphs: str) -> list[Trained]:
        env = {"RANNC_PROFILE": "never", "RANNC_CUDA_GRAPHS": graphs, **loop.env}
        return ranks(2).run(_same, inside, place, graphs, env=env)

    expected = trained(0, SAME[inside][0], "off")
    for place, loop in enumerate(SAME[inside]):
        for one, other in zip(expected, trained(place, loop, "auto"), strict=True):
            assert other.losses == pytest.approx(one.losses, rel=1e-12)
            for key, tensor in one.state.items():
                torch.testing.assert_close(other.state[key], tensor, rtol=1e-10, atol=1e-10)
