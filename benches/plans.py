"""Plans in a few characters."""

from __future__ import annotations

from itertools import groupby

from pyrannc.core.plan import PlanFacts, StagePlan

_SPELLED_OUT = 2
"""Equal Stages in a row that are written one by one."""


def describe(plan: PlanFacts) -> str:
    """A plan as ``4+4, 8 mb`` for two Stages of four Replicas and eight microbatches by 1F1B."""
    schedule = "" if plan.schedule == "1f1b" else f", {plan.schedule.replace('_', '-')}"
    runs = [(stage, len(list(equal))) for stage, equal in groupby(map(_stage, plan.stages))]
    stages = [f"{count} x {stage}" if count > _SPELLED_OUT else "+".join([stage] * count) for stage, count in runs]
    return f"{'+'.join(stages)}, {plan.microbatches} mb{schedule}"


def _stage(stage: StagePlan) -> str:
    again = stage.recompute
    recompute = " recomputed" if "stage" in again else " partly recomputed" if "block" in again else ""
    sharding = "" if stage.sharding == "none" else f" sharded {stage.sharding}"
    return f"{len(stage.ranks)}{recompute}{sharding}{' offloaded' if stage.offload else ''}"
