"""The ledger: what the Plan predicted beside what the last training steps took."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import torch

from pyrannc._native import paragraph, table
from pyrannc.core.plan import PlanFacts, StagePlan
from pyrannc.errors import RaNNCError
from pyrannc.job import agree
from pyrannc.runtime.compiling import Outcome
from pyrannc.runtime.deployment import Deployment
from pyrannc.runtime.timing import Kind, StepTimes

_MS = 1e-3
_GIB = 2**30
_FAR = 0.5
"""A larger error of a predicted step is remarked on."""


@dataclass(frozen=True)
class Compared:
    """A figure, predicted and measured; ``None`` where it is not known."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """By what share of the measured the prediction is too high (if negative: too low)."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class StageReport:
    """A Stage: one microbatch on its largest and, if there are several, slowest Replica.

    Attributes:
        ranks: of its Replicas.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_us: Compared
    backward_us: Compared


@dataclass(frozen=True)
class RankReport:
    """Where a rank's time went in a step, and its memory.

    Computing, waiting, reduction and the rest add up to the step.

    Attributes:
        computing_us: forwards and backwards.
        waiting_us: between the step's start and the end of the last computation, without a computation: for messages
            of other Stages, for the step's inputs, or for the host. Predicted: what the other parts leave of the step.
        reduce_us: from the end of the last computation until gradients were summed; what overlaps does not count.
        rest_us: until the next step: outputs, the optimizer (which alone is predicted), and what else the training loop
            does.
        bubble: share of the step in which neither a forward nor a backward ran.
        peak_bytes: peak of the tensors on the device since deployment, or since the last
            ``torch.cuda.reset_peak_memory_stats()``. The framework's own memory is in neither figure. Predicted: what
            the Plan counts, and a second set of gradients where the script has made one necessary.
        reserved_bytes: peak of what torch's allocator held; measured only.
    """

    rank: int
    stage: int
    computing_us: Compared
    waiting_us: Compared
    reduce_us: Compared
    rest_us: Compared
    bubble: Compared
    peak_bytes: Compared
    reserved_bytes: Compared


@dataclass(frozen=True)
class Report:
    """Predicted against measured, the same on all ranks.

    Measured times are medians over the steps. The step is that of the slowest rank, from one training step's start to
    the next one's: with the optimizer and all else that the training loop does.

    Attributes:
        steps: how many were measured: the last ones that brought as many rows as the last.
        batch_rows: rows of their global batches.
        plan_rows: rows of the global batch that the Plan was made for; other batches take other times.
        precision: types of parameters, products and sums of the call that the Plan was made for.
        step_us: the whole step.
        bubble: share of all devices' time in which neither a forward nor a backward ran.
        compared: whether the captured graph was held against the model itself before it trained, or why not.
        compiled: how many Spans run compiled, and why others do not; nothing where compiling is off.
        recorded: how many kinds of steps the ranks replay as CUDA graphs, and why others not, by rank where that
            differs; nothing on the host.
    """

    steps: int
    batch_rows: int
    plan_rows: int
    microbatches: int
    precision: str
    step_us: Compared
    bubble: Compared
    stages: tuple[StageReport, ...]
    ranks: tuple[RankReport, ...]
    compared: str
    compiled: str = ""
    recorded: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists and numbers."""
        content: dict[str, Any] = json.loads(self.to_json())
        return content

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        """Reads what :meth:`to_json` wrote."""
        content = json.loads(text)
        content["stages"] = tuple(
            StageReport(**{**_figures(stage), "ranks": tuple(stage["ranks"])}) for stage in content["stages"]
        )
        content["ranks"] = tuple(RankReport(**_figures(rank)) for rank in content["ranks"])
        return Report(**_figures(content))

    def __str__(self) -> str:
        return _tables(self)


def _figures(content: dict[str, Any]) -> dict[str, Any]:
    return {name: Compared(**item) if isinstance(item, dict) else item for name, item in content.items()}


# Measured


@dataclass(frozen=True)
class _Measured:
    """What one rank saw: medians over its last steps, and peaks of memory.

    Attributes:
        sizes: rows of each microbatch on this rank; times of one microbatch are means over those that have most.
        second_bytes: of gradients that the Plan does not count.
    """

    stage: int
    steps: int
    batch_rows: int
    microbatches: int
    sizes: tuple[int, ...]
    step_us: float
    forward_us: float
    backward_us: float
    computing_us: float
    waiting_us: float
    reduce_us: float
    rest_us: float
    bubble: float
    second_bytes: int
    peak_bytes: int | None
    reserved_bytes: int | None

    @property
    def most_rows(self) -> int:
        """Of a microbatch on this rank."""
        return max(self.sizes)


def report(deployment: Deployment, compared: str) -> Report:
    """Collects every rank's measurements and sets them beside the Plan's predictions. All ranks call it.

    Raises:
        RaNNCError: there have not been two training steps in a row yet.
    """
    measured = agree.together(lambda: _measure(deployment))
    everyone: list[_Measured] = agree.gather_objects(measured)
    found = _compare(PlanFacts.of(deployment.plan), deployment.precision, everyone, compared)
    if deployment.compiling is not None:
        outcome = Outcome.joined(agree.gather_objects(deployment.compiling.own))
        found = replace(found, compiled=str(outcome))
    if deployment.recordings is not None:
        found = replace(found, recorded=_by_rank(agree.gather_objects(str(deployment.recordings))))
    return found


def _by_rank(texts: Sequence[str]) -> str:
    """What ranks say, once for all that say the same.

    >>> _by_rank(["all", "all"]), _by_rank(["all", "none", "all"])
    ('all', 'rank 0, 2: all; rank 1: none')
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return texts[0] if len(ranks) == 1 else "; ".join(f"rank {', '.join(own)}: {text}" for text, own in ranks.items())


def _measure(deployment: Deployment) -> _Measured:
    steps = deployment.timing.times()
    if not steps:
        raise RaNNCError(
            "report() has nothing to show yet: it needs two training steps, one after the other, with their backwards, "
            "because a step is measured from its start to the start of the next one"
        )
    program = steps[-1].program
    steps = [step for step in steps if step.program is program]
    sizes = [hi - lo for lo, hi in program.rows]
    largest = {microbatch for microbatch, rows in enumerate(sizes) if rows == max(sizes)}
    parts = [_parts_us(step) for step in steps]
    on_gpu = deployment.device.type == "cuda"
    return _Measured(
        stage=deployment.stage,
        steps=len(steps),
        batch_rows=program.total_rows,
        microbatches=sum(rows > 0 for rows in program.microbatches),
        sizes=tuple(sizes),
        step_us=median(step.step_us for step in steps),
        forward_us=median(_microbatch_us(step, "forward", largest) for step in steps),
        backward_us=median(_microbatch_us(step, "backward", largest) for step in steps),
        **{name: median(part[name] for part in parts) for name in parts[0]},
        bubble=median(1 - part["computing_us"] / step.step_us for part, step in zip(parts, steps, strict=True)),
        second_bytes=deployment.gradients.second_bytes,
        peak_bytes=_peak_bytes(deployment) if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(deployment.device) if on_gpu else None,
    )


def _peak_bytes(deployment: Deployment) -> int:
    """The allocator has seen the recording of a step, and does not see replays."""
    replay_bytes = 0 if deployment.recordings is None else deployment.recordings.replay_bytes
    held_bytes = torch.cuda.memory_allocated(deployment.device)
    return max(torch.cuda.max_memory_allocated(deployment.device), held_bytes + replay_bytes)


def _parts_us(step: StepTimes) -> dict[str, float]:
    """The step's time by use."""
    computing_us = sum(span.end_us - span.start_us for span in step.spans)
    computed_us = max((span.end_us for span in step.spans), default=0.0)
    return {
        "computing_us": computing_us,
        "waiting_us": computed_us - computing_us,
        "reduce_us": step.reduced_us - computed_us,
        "rest_us": step.step_us - step.reduced_us,
    }


def _microbatch_us(step: StepTimes, kind: Kind, microbatches: set[int]) -> float:
    # A backward may come in two parts.
    times: defaultdict[int, float] = defaultdict(float)
    for span in step.spans:
        if span.kind == kind and span.microbatch in microbatches:
            times[span.microbatch] += span.end_us - span.start_us
    return fmean(times.values()) if times else 0.0


# Beside the predictions


def _compare(plan: PlanFacts, precision: str, everyone: Sequence[_Measured], compared: str) -> Report:
    return Report(
        steps=min(rank.steps for rank in everyone),
        batch_rows=everyone[0].batch_rows,
        plan_rows=plan.batch_rows,
        microbatches=everyone[0].microbatches,
        precision=precision,
        step_us=Compared(plan.predicted.step_us, max(rank.step_us for rank in everyone)),
        bubble=Compared(plan.predicted.bubble, fmean(rank.bubble for rank in everyone)),
        stages=tuple(_compare_stage(stage, number, everyone) for number, stage in enumerate(plan.stages)),
        ranks=tuple(_compare_rank(plan, rank, measured) for rank, measured in enumerate(everyone)),
        compared=compared,
    )


def _compare_stage(stage: StagePlan, number: int, everyone: Sequence[_Measured]) -> StageReport:
    replicas = [everyone[rank] for rank in stage.ranks]
    largest = [replica for replica in replicas if replica.most_rows == max(other.most_rows for other in replicas)]
    return StageReport(
        stage=number,
        ranks=stage.ranks,
        forward_us=Compared(stage.predicted.forward_us, max(replica.forward_us for replica in largest)),
        backward_us=Compared(stage.predicted.backward_us, max(replica.backward_us for replica in largest)),
    )


def _compare_rank(plan: PlanFacts, rank: int, measured: _Measured) -> RankReport:
    step_us = plan.predicted.step_us
    predicted = plan.stages[measured.stage].predicted
    computing_us = predicted.computing_us(measured.sizes)
    reduce_us, update_us = predicted.reduce_us, predicted.update_us
    return RankReport(
        rank=rank,
        stage=measured.stage,
        computing_us=Compared(computing_us, measured.computing_us),
        waiting_us=Compared(max(0.0, step_us - computing_us - reduce_us - update_us), measured.waiting_us),
        reduce_us=Compared(reduce_us, measured.reduce_us),
        rest_us=Compared(update_us, measured.rest_us),
        # A Plan that was written by hand may predict nothing.
        bubble=Compared(max(0.0, 1 - computing_us / step_us) if step_us else None, measured.bubble),
        peak_bytes=Compared(predicted.memory.tensors_bytes + measured.second_bytes, measured.peak_bytes),
        reserved_bytes=Compared(None, measured.reserved_bytes),
    )


# As tables


def _tables(report: Report) -> str:
    rows, microbatches = _counted(report.batch_rows, "row"), _counted(report.microbatches, "microbatch")
    parts = [
        paragraph(
            f"{rows} in {microbatches}, median of {_counted(report.steps, 'step')}: predicted / measured (error of the "
            "prediction)"
        ),
        paragraph(f"{report.precision[:1].upper()}{report.precision[1:]}."),
        _step_table(report),
        _stage_table(report),
        _rank_table(report),
        paragraph(report.compared),
        *(paragraph(f"{text}.") for text in (report.compiled, report.recorded) if text),
    ]
    if report.batch_rows != report.plan_rows:
        parts.append(
            paragraph(
                f"The plan was made for {_counted(report.plan_rows, 'row')}, so its predictions are for another batch."
            )
        )
    if abs(report.step_us.error or 0.0) > _FAR:
        parts.append(paragraph(_why_far(report)))
    return "\n".join(parts).rstrip("\n")


def _why_far(report: Report) -> str:
    missed_us = _more_than_predicted_us(report.step_us)
    idle_us = min(_more_than_predicted_us(rank.waiting_us, rank.rest_us) for rank in report.ranks)
    on_gpu = report.ranks[0].peak_bytes.measured is not None
    if on_gpu and len(report.stages) == 1 and idle_us > missed_us / 2 > 0:
        return (
            f"For {idle_us * _MS:.2f} ms of a step devices neither compute the model nor sum gradients: they wait for "
            "the training loop, or do what else it asks for. If more rows in a batch hardly take longer, the host "
            "bounds the step; the prediction is what devices need."
        )
    return (
        "The prediction is far from what was measured. Devices that nothing describes are taken as their preset says; "
        "`python -m pyrannc calibrate -o cluster.toml` measures those of this machine."
    )


def _more_than_predicted_us(*figures: Compared) -> float:
    return sum((figure.measured or 0.0) - (figure.predicted or 0.0) for figure in figures)


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{count} {what}" if count == 1 else f"{count} {what}{plural}"


def _step_table(report: Report) -> str:
    computing = (None if share is None else 1 - share for share in (report.bubble.predicted, report.bubble.measured))
    return table([("Step, ms", True), ("Computing", True)], [[_ms(report.step_us), _percent(Compared(*computing))]])


def _stage_table(report: Report) -> str:
    amounts = [("Forward of a microbatch, ms", True), ("Backward of a microbatch, ms", True)]
    rows = [
        [str(stage.stage), ", ".join(map(str, stage.ranks)), _ms(stage.forward_us), _ms(stage.backward_us)]
        for stage in report.stages
    ]
    return table([("Stage", False), ("Ranks", False), *amounts], rows)


def _rank_table(report: Report) -> str:
    amounts = ["Computing, ms", "Waiting, ms", "Reduction, ms", "Rest, ms", "Peak, GiB", "Reserved, GiB"]
    rows = [
        [
            str(rank.rank),
            str(rank.stage),
            _ms(rank.computing_us),
            *(_beside(figure, _MS, ".2f") for figure in (rank.waiting_us, rank.reduce_us, rank.rest_us)),
            _beside(rank.peak_bytes, 1 / _GIB, ".2f") + _error(rank.peak_bytes),
            _beside(rank.reserved_bytes, 1 / _GIB, ".2f"),
        ]
        for rank in report.ranks
    ]
    return table([("Rank", False), ("Stage", False), *((name, True) for name in amounts)], rows)


def _ms(figure: Compared) -> str:
    return _beside(figure, _MS, ".2f") + _error(figure)


def _percent(figure: Compared) -> str:
    return _beside(figure, 1.0, ".1%")


def _beside(figure: Compared, scale: float, form: str) -> str:
    predicted, measured = (
        "-" if value is None else format(value * scale, form) for value in (figure.predicted, figure.measured)
    )
    return f"{predicted} / {measured}"


def _error(figure: Compared) -> str:
    if figure.error is None:
        return ""
    text = f"{figure.error:+.1%}"
    return f" ({text if text.strip('+-') != '0.0%' else '0.0%'})"
