"""Runs a habit under a row of the array, in one process or as one of RaNNC's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

import pyrannc
from tests.contract.job import Job, Note, RankJob
from tests.contract.running import fresh
from tests.runtime.equivalence import default_dtype

from .array import Row
from .habits import HABITS
from .loop import Loop
from .precision import Precision

SHARDING = {
    "off": {"none"},
    "1": {"optimizer"},
    "2": {"gradients"},
    "3": {"kept_params", "params"},
}
"""What Plans call the levels of ZeRO."""


@dataclass(frozen=True)
class Run:
    """What a habit came to on one rank.

    Attributes:
        notes: what it has computed.
        wrong: in words, where a Plan is not the row's.
    """

    notes: list[Note]
    wrong: list[str]


def run_plain(name: str, row: Row, precision: Precision) -> list[Note]:
    """The habit with the plain model and the global batch in this process."""
    job = Job()
    _run(name, job, row, precision)
    return job.notes


def run_rank(name: str, row: Row, precision: Precision) -> Run:
    """The habit on this rank, with this rank's rows. All ranks call it."""
    job = RankJob(pyrannc.get_rank(), row.layout.rows)
    _run(name, job, row, precision)
    wrong = [text for module in job.modules if module.ready for text in _wrong_plan(module, row)]
    for module in job.modules:
        if module.ready:
            module.undeploy()
    return Run(job.notes, wrong)


def _run(name: str, job: Job, row: Row, precision: Precision) -> None:
    # Weights are drawn in the same type for the truth and for what rounds it.
    with fresh(), default_dtype(torch.float32):
        HABITS[name](partial(Loop, job, row, precision))


def _wrong_plan(module: pyrannc.RaNNCModule, row: Row) -> list[str]:
    """Forced levels must be those of the Plan, or the row proves nothing."""
    plan, layout = module.plan, row.layout
    got = (len(plan["stages"]), plan["microbatches"], sum(len(stage["ranks"]) for stage in plan["stages"]))
    expected = (layout.stages, layout.microbatches, len(layout.rows))
    wrong = [] if got == expected else [f"Stages, microbatches and ranks are {got} instead of {expected}"]
    divided = {stage["sharding"] for stage in plan["stages"] if len(stage["ranks"]) > 1}
    if divided - SHARDING[row.zero]:
        wrong.append(f"Replicas divide {divided} instead of {SHARDING[row.zero]}")
    return wrong
