"""The benchmarks' own code, on small sizes and without a GPU."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import best_plan
import jobs
import pytest
import torch
from compete import ROWS, table
from competitors import SYSTEMS
from jobs import Done, Job, run_jobs
from models import MODELS, loss_is_inside, loss_of, make_batch, make_model
from planning import plans
from plans import describe
from traces import messages, pauses_us, without_waits

from pyrannc._native import Graph
from pyrannc.capture import capture
from pyrannc.core.plan import MemoryPrediction, PlanFacts, StagePlan, StagePrediction, StepPrediction
from tests.conformance.programs import cases
from tests.ranks import run_programs

BENCHES = Path(__file__).parents[1] / "benches"
SIZES = {
    "chain": [8, 3],
    "bert": [1, 64, 16],
    "gpt2": [1, 64, 16],
    "t5": [1, 16, 32, 2, 8, 12],
    "resnet152": [1, 32],
    "unet3d": [4, 3, 8, 8, 8],
}


def test_sizes_are_given_for_every_family() -> None:
    assert SIZES.keys() == MODELS.keys()
    assert all(len(SIZES[name]) == len(recipe.sizes) for name, recipe in MODELS.items())


@pytest.mark.parametrize("name", list(SIZES))
def test_a_family_trains_and_is_captured_without_memory(name: str) -> None:
    with torch.device("meta"):
        hollow = make_model(name, SIZES[name], 0)
    batch = make_batch(name, 3, SIZES[name], 0, 0)
    graph = Graph.from_json(capture(hollow, (), batch, device=torch.device("cuda", 0), rows=3).graph_json)
    assert graph.op_texts()
    model = make_model(name, SIZES[name], 0)
    output = model(**batch)
    assert loss_is_inside(name) == (not isinstance(output, torch.Tensor) or output.dim() == 0)
    loss = loss_of(output)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(param.grad is not None for param in model.parameters())


def test_ranks_have_batches_of_their_own() -> None:
    first, again, other = (make_batch("bert", 3, SIZES["bert"], 0, rank)["input_ids"] for rank in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_wide_resnet_has_the_parameters_of_the_literature() -> None:
    with torch.device("meta"):
        count = sum(param.numel() for param in make_model("resnet152", [8, 224], 0).parameters())
    assert count == pytest.approx(3.7e9, rel=0.01)


@pytest.mark.parametrize(("pieces", "devices"), [(1, 4), (4, 1), (5, 3), (6, 4)])
def test_plans_are_counted(pieces: int, devices: int) -> None:
    def ways(length: int, parts: int) -> int:
        return len(list(combinations(range(1, length), parts - 1)))

    count = sum(ways(pieces, stages) * ways(devices, stages) for stages in range(1, pieces + 1))
    assert 10 ** plans(pieces, devices) == pytest.approx(count)


def test_prediction_prints_a_line_for_every_limit() -> None:
    command = [sys.executable, str(BENCHES / "prediction.py"), "bert", "4", "--sizes", *map(str, SIZES["bert"])]
    limits = ["--memory-limits-gb", "0.001", "4"]
    ranks = run_programs(2, *command, *limits, "--steps", "2", "--warmup", "1")
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].stderr
    refused, ran = (json.loads(line) for line in ranks[0].stdout.splitlines())
    assert "does not fit into memory" in refused["failure"]
    assert (ran["memory_limit_gb"], ran["ranks"], ran["plan"]) == (4, 2, "2, 1 mb")
    assert ran["measured_ms"] > 0
    assert ran["time_error"] == pytest.approx(ran["predicted_ms"] / ran["measured_ms"] - 1, abs=1e-3)
    assert ran["measured_gib"] is None
    assert len(ran["report"]["ranks"]) == 2
    assert ranks[1].stdout == ""


def test_full_sizes_are_held_against_one_process() -> None:
    ranks = run_programs(2, sys.executable, str(BENCHES / "full_size.py"), "--cell", "tiny-mixtral")
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].stderr
    found = json.loads(ranks[0].stdout)
    assert found["losses"] == pytest.approx(found["plain_losses"], rel=1e-3)
    assert found["losses"][-1] < found["losses"][0]
    assert ranks[1].stdout == ""


def test_jobs_keep_what_they_have_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "launcher", lambda ranks: [sys.executable])
    scripts = {
        "good": 'print("{\\"here\\": 1}")',
        "slow": 'print("{\\"here\\": 2}", flush=True); import time; time.sleep(100)',
        "bad": 'raise ValueError("boom")',
    }
    waiting = []
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
        waiting.append(Job(name, 1, (str(tmp_path / f"{name}.py"),)))
    told: list[Done] = []
    found = run_jobs([*waiting, Job("large", 3, ())], 2, timeout_s=3, deadline_s=60, tell=told.append)
    assert told == found
    by_name = {done.job.name: done for done in found}
    assert (by_name["good"].results, by_name["good"].failure) == ([{"here": 1}], "")
    assert by_name["slow"].results == [{"here": 2}]
    assert by_name["slow"].failure.startswith("stopped after 3")
    assert (by_name["bad"].results, by_name["bad"].failure) == ([], "boom")
    assert by_name["large"].failure == "needs 3 devices"


def test_jobs_take_the_devices_that_the_script_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "launcher", lambda ranks: [sys.executable])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps({'shown': os.environ['CUDA_VISIBLE_DEVICES']}))")
    found = run_jobs([Job(name, 1, (str(script),)) for name in "ab"], 2, 20, 60, lambda _: None)
    assert sorted(done.results[0]["shown"] for done in found) == ["5", "7"]


def test_a_plan_that_ends_its_run_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["chosen.json", "next 1.json", "random 1.json"]
    times_ms = {"chosen.json": 10.3, "random 1.json": 10.0}

    def run(options: Namespace, item: Job, ends: float) -> Done:
        asked = [Path(text).name for text in item.script if text.endswith(".json")]
        results = []
        for name in asked:
            if name not in times_ms:
                return Done(item, 1.0, results, "out of memory")
            results.append({"plan_file": name, "plan": "2, 1 mb", "predicted_ms": 9.0, "measured_ms": times_ms[name]})
        return Done(item, 1.0, results)

    monkeypatch.setattr(best_plan, "run", run)
    options = Namespace(
        model="bert", rows=4, sizes=[1, 64, 16], memory_limit_gb=1.0, dtype="float32", tf32=True, ranks=2
    )
    files = [Path("/plans") / name for name in names]
    found = best_plan.time_plans(options, files, float("inf"))
    assert found["next 1.json"] == {"failure": "out of memory"}
    assert found["random 1.json"]["measured_ms"] == 10.0
    text = best_plan.markdown(found)
    assert "The chosen plan is within 3.0% of the fastest of 2." in text
    assert text.index("random 1") < text.index("chosen")
    late = best_plan.time_plans(options, files, 0.0)
    assert late == {name: {"failure": "no time was left"} for name in names}


def test_plans_are_described_in_a_few_characters() -> None:
    nothing = StagePrediction(0, 0, 0, 0, MemoryPrediction(0, 0, 0, 0, 0, 0, 0))

    def stage(ranks: int, recompute: str, sharding: str, offload: bool) -> StagePlan:
        return StagePlan((), tuple(range(ranks)), ("none", recompute), sharding, offload, nothing)

    def described(stages: Sequence[StagePlan], microbatches: int, schedule: str) -> str:
        world_size = sum(len(stage.ranks) for stage in stages)
        return describe(PlanFacts(world_size, 8, microbatches, schedule, tuple(stages), StepPrediction(0, 0)))

    stages = [
        stage(2, "none", "none", False),
        stage(1, "stage", "optimizer", False),
        stage(1, "block", "none", True),
    ]
    assert described(stages, 4, "1f1b") == ("2+1 recomputed sharded optimizer+1 partly recomputed offloaded, 4 mb")
    assert described(stages[:1], 1, "fill_drain") == "2, 1 mb, fill-drain"
    assert described(stages[:1] * 5, 8, "1f1b") == "5 x 2, 8 mb"


def test_a_state_travels_one_tensor_at_a_time() -> None:
    ended = run_programs(3, sys.executable, str(BENCHES / "state.py"), "--layers", "24", "--width", "1024")
    assert all(program.status == 0 for program in ended), ended
    every = [json.loads(program.stdout) for program in ended]
    assert sum(found["held"] for found in every) == every[0]["model"]
    for rank, found in enumerate(every):
        most = found["model"] if rank == 0 else 0
        # Messages and libraries take some more.
        assert found["save"] < most + 4 * found["tensor"], found
        assert found["load"] < 4 * found["tensor"], found


def test_the_exchange_and_the_start_are_timed() -> None:
    first, second = run_programs(2, sys.executable, str(BENCHES / "agreement.py"), "--repeats", "20")
    assert (first.status, second.status, second.stdout) == (0, 0, ""), first
    found = json.loads(first.stdout)
    assert found.keys() == {"exchange", "gloo"}
    assert all(0 < best <= median for median, best in found.values())
    ended = run_programs(2, sys.executable, str(BENCHES / "start.py"), "--one")
    assert all(program.status == 0 for program in ended), ended
    assert [name for name, _, _ in json.loads(ended[1].stdout)].count("a call") == 3


def test_pauses_are_between_what_works() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 4.0},
        {"cat": "kernel", "name": "ncclDevKernel_SendRecv", "ts": 3.0, "dur": 5.0},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 50.0},
        {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 10.0, "dur": 2.0},
    ]
    assert pauses_us(events) == (12.0, [0.0, 0.0, 2.0])
    assert pauses_us(events, but="nccl") == (12.0, [0.0, 6.0])
    assert pauses_us([events[2]]) == (0.0, [])


def test_messages_work_once_all_ranks_have_come() -> None:
    def kernel(name: str, start: float, end: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": end - start}

    first, last = kernel("nccl_sum", 0.0, 8.0), kernel("nccl_sum", 10.0, 20.0)
    events = [last, kernel("product", 0.0, 4.0), kernel("nccl_gather", 1.0, 3.0), first]
    assert messages(events) == [kernel("nccl_gather", 1.0, 3.0), first, last]
    assert pauses_us(events)[1] == [0.0, 0.0, 0.0, 2.0]
    span_us, pauses = pauses_us(without_waits(events, [1.0, 3.0, 6.0]))
    assert span_us == 20.0
    assert pauses == [0.0, 0.0, 1.0, 6.0]
    assert first["dur"] == 8.0


def test_peers_are_neither_rannc_nor_what_travels_nowhere() -> None:
    cell = {"row": "tiny-bert", "round": 0, "ranks": 2, "losses": [1.0], "reserved_gib": 0.0, "predicted_ms": None}
    figures = {"ddp": 8.0, "rannc": 6.0, "bound": 4.0}
    cells = [cell | {"system": system, "ms": [ms, ms], "idle": None, "first_s": 1.0} for system, ms in figures.items()]
    cells[1] |= {"predicted_ms": 9.0, "memory_error": -0.02, "idle": 0.25}
    found = table(cells, 2)
    columns = {str(column.header): list(column.cells) for column in found.columns}
    assert columns["of best peer"] == ["1.000", "0.750", "0.500"]
    assert columns["predicted"] == ["", "+50.0%", ""]
    assert columns["memory predicted"] == ["", "-2.0%", ""]
    assert columns["idle"] == ["", "25.0%", ""]
    assert columns["losses"] == ["equal", "equal", ""]


def test_rows_to_compete_in_are_told_apart() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert {system for row in ROWS for system in row.systems} <= SYSTEMS.keys()
    assert max(sum(row.ranks == ranks for row in ROWS) for ranks in (2, 8)) <= 25


def test_ranks_have_as_many_rows_wherever_a_row_competes() -> None:
    rows = {row.name: row for row in ROWS}
    assert [rows["bert 5 B"].task_for(ranks).rows for ranks in (1, 4, 8)] == [16, 64, 128]
    assert rows["tiny-bert"].task_for(4) == rows["tiny-bert"].task


def test_the_list_of_programs_is_timed() -> None:
    arguments = ("-m", "benches.conformance", "--tokens", "2", "--width", "8", "--steps", "2")
    first, second = run_programs(2, sys.executable, *arguments)
    assert first.status == second.status == 0, first
    timed = [case for case in cases() if case.world_size == 2 and case.call != "forward"]
    lines = [line for line in first.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(timed) > 2
    # A name, and what was predicted and measured.
    figures = [list(map(float, line.split("|")[2:4])) for line in lines[2:]]
    assert all(figure > 0 for figures_of_case in figures for figure in figures_of_case)
    assert f"over {len(timed)} cases" in first.stdout
