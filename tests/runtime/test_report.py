"""The ledger: measured beside predicted, the same on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyrannc
from pyrannc.core.plan import MemoryPrediction, PassPrediction, StagePrediction
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import process
from pyrannc.ledger import Compared, RankReport, Report, StageReport
from pyrannc.runtime.timing import KEPT_STEPS, Timing
from tests.ranks import RankPool

from .equivalence import Case, Twins, double_precision, make_batch
from .plans import cut_plan, graph_of

Ranks = Callable[[int], RankPool]

INSIDE = Case("loss_inside", (2, 3, 1), replicas=(1, 2), microbatches=3)
OUTSIDE = Case("chain", (4, 4), stages=2, microbatches=4)


def trained(case: Case, folder: str, steps: int) -> str:
    """The report after so many steps, as JSON."""
    with double_precision():
        twins = Twins(case, folder)
        for step in range(steps):
            twins.step(step)
        report = twins.module.report()
        twins.module.undeploy()
        return report.to_json()


def report_of(case: Case, pool: RankPool, folder: Path, steps: int) -> Report:
    """The report, which must be the same on all ranks."""
    texts: list[str] = pool.run(trained, case, str(folder), steps)
    assert len(set(texts)) == 1
    return Report.from_json(texts[0])


@pytest.mark.parametrize("case", [INSIDE, OUTSIDE], ids=["loss_inside", "criterion_outside"])
def test_times_are_there_and_add_up(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    report = report_of(case, ranks(len(case.rows)), tmp_path, 4)
    assert (report.steps, report.batch_rows, report.microbatches) == (3, case.total_rows, case.microbatches)
    assert [rank.rank for rank in report.ranks] == list(range(len(case.rows)))
    step_us = measured(report.step_us)
    for stage in report.stages:
        forward_us, backward_us = measured(stage.forward_us), measured(stage.backward_us)
        assert 0 < forward_us < step_us
        assert 0 < backward_us < step_us
        assert all(report.ranks[rank].stage == stage.stage for rank in stage.ranks)
        # A Stage's times are those of its slowest Replica, which another one may do better than in all.
        assert max(forward_us, backward_us) < max(measured(report.ranks[rank].computing_us) for rank in stage.ranks)
    for rank in report.ranks:
        assert 0 < measured(rank.computing_us) < step_us
        assert all(measured(part) >= 0 for part in (rank.waiting_us, rank.reduce_us, rank.rest_us))
        assert 0 < measured(rank.bubble) < 1
        assert all((part.predicted or 0) >= 0 for part in (rank.waiting_us, rank.reduce_us, rank.rest_us))
        assert rank.peak_bytes.measured is None, "the host's memory is not measured"
        assert rank.peak_bytes.predicted
    assert report.step_us.predicted
    assert 0 <= (report.bubble.predicted or 0.0) <= 1


def test_microbatches_are_predicted_by_their_size() -> None:
    memory = MemoryPrediction(0, 0, 0, 0, 0, 0, 0)
    sizes = (PassPrediction(6, 30.0, 60.0), PassPrediction(4, 25.0, 45.0), PassPrediction(3, 20.0, 40.0))
    uneven = StagePrediction(30.0, 60.0, 0.0, 0.0, memory, sizes)
    assert uneven.computing_us([6, 4, 3, 3]) == 90.0 + 70.0 + 2 * 60.0
    assert uneven.computing_us([5, 2, 0]) == 80.0 + 50.0
    even = StagePrediction(30.0, 60.0, 0.0, 0.0, memory)
    assert even.computing_us([6, 6]) == 180.0
    assert even.computing_us([]) == 0.0


def measured(figure: Compared) -> float:
    assert figure.measured is not None
    return figure.measured


def test_only_the_last_steps_count(ranks: Ranks, tmp_path: Path) -> None:
    report = report_of(OUTSIDE, ranks(2), tmp_path, KEPT_STEPS + 4)
    assert report.steps == KEPT_STEPS


def test_parts_of_a_single_measured_step_sum_to_it(ranks: Ranks, tmp_path: Path) -> None:
    report = report_of(OUTSIDE, ranks(2), tmp_path, 2)
    sums = [
        sum(map(measured, (rank.computing_us, rank.waiting_us, rank.reduce_us, rank.rest_us))) for rank in report.ranks
    ]
    assert max(sums) == pytest.approx(measured(report.step_us))
    for rank, step_us in zip(report.ranks, sums, strict=True):
        assert measured(rank.bubble) == pytest.approx(1 - measured(rank.computing_us) / step_us)


def test_a_report_prints_and_reads_back(ranks: Ranks, tmp_path: Path) -> None:
    report = report_of(INSIDE, ranks(3), tmp_path, 3)
    assert Report.from_json(json.dumps(report.to_dict())) == report
    text = str(report)
    assert "6 rows in 3 microbatches, median of 2 steps" in text
    assert f"{measured(report.step_us) / 1e3:.2f}" in text
    assert "Parameters in float64, products in float64, gradients summed over ranks in float64." in " ".join(
        text.split()
    )
    assert "- / -" in text, "memory that is not measured"
    assert text.count("\n") < 40


def held(case: Case, folder: str) -> tuple[list[float], int]:
    """The predicted peak of this rank's memory before and after gradients were held; the bytes of its gradients."""
    with double_precision():
        twins = Twins(case, folder)
        for step in range(3):
            twins.step(step)
        peaks = [own_peak(twins.module)]
        twins.losses(3)[0].backward()
        twins.losses(4)[0].backward()
        grads = [param.grad for param in twins.module.parameters(from_global=False) if param.grad is not None]
        for step in range(5, 8):
            twins.step(step)
        peaks.append(own_peak(twins.module))
        twins.module.undeploy()
        return peaks, sum(grad.nbytes for grad in grads)


def own_peak(module: Any) -> float:
    peak: float = module.report().ranks[process.get_rank()].peak_bytes.predicted
    return peak


def test_held_gradients_are_counted(ranks: Ranks, tmp_path: Path) -> None:
    for peaks, grad_bytes in ranks(2).run(held, OUTSIDE, str(tmp_path)):
        assert grad_bytes > 0
        assert peaks[1] - peaks[0] == grad_bytes


def told_of_no_prediction(folder: str) -> str:
    """The report, as text, of a Plan that was written by hand."""
    net, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    file = Path(folder) / "plan.json"
    cut_plan(graph_of(net, (x,), {}, 4), [], [[0]], 1, 4).write(file)
    module = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1), load_deployment=str(file))
    for _ in range(3):
        module(x).sum().backward()
    report = module.report()
    assert report.step_us.predicted == 0
    assert report.ranks[0].bubble.predicted is None
    return str(report)


def test_a_plan_may_predict_nothing(ranks: Ranks, tmp_path: Path) -> None:
    (told,) = ranks(1).run(told_of_no_prediction, str(tmp_path))
    assert "0.0" in told


def refused(case: Case, folder: str) -> list[str]:
    """What report() says before there is anything to report."""
    with double_precision():
        twins = Twins(case, folder)
        told = [refusal(twins.module)]
        args, kwargs, _ = twins.local(make_batch(twins.recipe, case.total_rows, 0))
        with torch.no_grad():
            for _ in range(3):
                twins.module(*args, **kwargs)
        told.append(refusal(twins.module))
        twins.step(0)
        told.append(refusal(twins.module))
        with torch.no_grad():
            twins.module(*args, **kwargs)
        twins.step(1)
        told.append(refusal(twins.module))
        twins.step(2)
        twins.module.report()
        twins.module.undeploy()
        return told


def refusal(module: Any) -> str:
    with pytest.raises(RaNNCError) as caught:
        module.report()
    return str(caught.value)


def test_too_few_steps_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A step whose end was an evaluation does not count."""
    for undeployed, *others in ranks(2).run(refused, OUTSIDE, str(tmp_path)):
        assert undeployed == "report() needs a deployed model: call the module once first"
        assert len(others) == 3
        assert all("it needs two training steps, one after the other" in text for text in others)


def overlapping(case: Case, folder: str) -> int:
    """Two calls before their backwards: the first of them has no step of its own."""
    with double_precision():
        twins = Twins(case, folder)
        twins.step(0)
        first, _ = twins.losses(1)
        second, _ = twins.losses(2)
        (first + second).backward()
        twins.step(3)
        steps = twins.module.report().steps
        twins.module.undeploy()
        return steps


def test_calls_that_overlap_are_not_mixed_up(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(overlapping, OUTSIDE, str(tmp_path)) == [2, 2]


def test_a_prediction_that_is_far_off_says_what_to_do() -> None:
    """That devices wait for the training loop is no matter of calibration; between Stages it may be."""

    def text(rest_us: float, peak_bytes: float | None, stages: int = 1) -> str:
        unknown, none = Compared(None, None), Compared(0.0, 0.0)
        rank = RankReport(
            0, 0, Compared(200.0, 210.0), Compared(0.0, 50.0), none, Compared(40.0, rest_us), none,
            Compared(1e9, peak_bytes), unknown,
        )  # fmt: skip
        stage = StageReport(0, (0,), Compared(80.0, 80.0), Compared(120.0, 130.0))
        step = Compared(240.0, 260.0 + rest_us)
        report = Report(3, 8, 8, 1, "parameters in float32", step, none, (stage,) * stages, (rank,), "compared")
        return " ".join(str(report).split())

    assert "For 1.81 ms of a step devices neither compute" in text(1800.0, 1e9)
    assert "calibrate" not in text(1800.0, 1e9)
    assert "calibrate" in text(1800.0, None), "the host computes"
    assert "calibrate" in text(1800.0, 1e9, 2), "links may be slower than they are taken to be"
    assert not any(word in text(45.0, 1e9) for word in ("calibrate", "wait for the training"))


def test_errors_are_shares_of_the_measured() -> None:
    assert Compared(3.0, 2.0).error == pytest.approx(0.5)
    assert Compared(1.0, None).error is None
    assert Compared(None, 1.0).error is None
    assert Compared(1.0, 0.0).error is None


class Tick:
    """An event of a device on which every event takes a millisecond."""

    made = 0
    now_ms = 0

    def __init__(self) -> None:
        Tick.made += 1

    def record(self, _: object) -> None:
        Tick.now_ms += 1
        self.ms = Tick.now_ms

    def elapsed_time(self, end: Tick) -> float:
        return end.ms - self.ms


def _program() -> RankProgram:
    view = {"rank": 0, "call": "whole", "gather_inputs": True, "total_rows": 2, "microbatches": [1, 1]}
    view |= {"seats": [{"stage": 0, "rows": [], "global_rows": []}]}
    view |= {"exchanges": False, "value_window": None, "grad_window": 2}
    lists = ("slices", "inputs", "outputs", "forward", "backward")
    return RankProgram.from_json(json.dumps(view | {key: [] for key in lists}))


def test_events_serve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timing, "_new_event", lambda timing: Tick())
    timing, program = Timing(torch.device("cpu")), _program()
    for _ in range(3 * KEPT_STEPS):
        marks = timing.begin(program)
        assert marks is not None
        for microbatch in range(2):
            with marks.span("forward", microbatch):
                pass
        marks.finish()
    events_of_a_step = 1 + 2 * 2 + 1
    assert Tick.made <= (KEPT_STEPS + 2) * events_of_a_step
    found = timing.times()
    assert len(found) == KEPT_STEPS
    for step in found:
        assert step.step_us == events_of_a_step * 1e3
        assert [(span.microbatch, span.start_us, span.end_us) for span in step.spans] == [(0, 1e3, 2e3), (1, 3e3, 4e3)]
        assert step.reduced_us == 5e3


def test_times_of_a_replay_are_shifted_to_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timing, "_new_event", lambda timing: Tick())
    timing, program = Timing(torch.device("cpu")), _program()
    for _ in range(2):
        marks = timing.begin(program)
        assert marks is not None
        marks.replayed(lambda: [("forward", 0, 10.0, 30.0), ("backward", 0, 30.0, 80.0)])
        marks.finish()
    (times,) = timing.times()
    assert [(span.kind, span.start_us, span.end_us) for span in times.spans] == [
        ("forward", 1010.0, 1030.0),
        ("backward", 1030.0, 1080.0),
    ]
    assert (times.reduced_us, times.step_us) == (2e3, 3e3)
