"""Plans in a few characters."""

from __future__ import annotations

from typing import Any


def describe(plan: dict[str, Any]) -> str:
    """The content of a plan file as ``4+4, 8 mb`` for two Stages of four Replicas and eight microbatches by 1F1B."""
    schedule = "" if plan["schedule"] == "1f1b" else f", {plan['schedule'].replace('_', '-')}"
    return f"{'+'.join(map(_stage, plan['stages']))}, {plan['microbatches']} mb{schedule}"


def _stage(stage: dict[str, Any]) -> str:
    recompute = {"none": "", "stage": " recomputed"}.get(str(stage["recompute"]), " partly recomputed")
    sharding = "" if stage["sharding"] == "none" else f" sharded {stage['sharding']}"
    return f"{len(stage['ranks'])}{recompute}{sharding}{' offloaded' if stage['offload'] else ''}"
