"""A Plan: what it decides and what it predicts.

The classes mirror the core's JSON (crates/plan: ``Plan``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyrannc._native import Plan


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes on a device of a Stage, by use."""

    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    workspace_bytes: int
    comm_bytes: int
    framework_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return self.tensors_bytes + self.framework_bytes

    @property
    def tensors_bytes(self) -> int:
        """All but the framework's own."""
        state_bytes = self.params_bytes + self.grads_bytes + self.optimizer_bytes
        return state_bytes + self.activations_bytes + self.workspace_bytes + self.comm_bytes


@dataclass(frozen=True)
class PassPrediction:
    """Expected forward and backward of a microbatch with so many rows."""

    rows: int
    forward_us: float
    backward_us: float

    @property
    def computing_us(self) -> float:
        """Both."""
        return self.forward_us + self.backward_us


@dataclass(frozen=True)
class StagePrediction:
    """Expected cost of a Stage, per microbatch on its largest Replica; reduction and update once a step.

    Attributes:
        sizes: its microbatches by their rows, the largest first; none where all are equal.
    """

    forward_us: float
    backward_us: float
    reduce_us: float
    update_us: float
    memory: MemoryPrediction
    sizes: tuple[PassPrediction, ...] = ()

    def computing_us(self, rows: Sequence[int]) -> float:
        """Forwards and backwards of microbatches with so many rows, of which the largest is the largest predicted.

        Between two sizes, and below the smallest, times lie on the line through the two nearest.
        """
        most = max(rows, default=0)
        known = self.sizes or (PassPrediction(most, self.forward_us, self.backward_us),)
        return sum(_computing_us(known, count) for count in rows if count)


def _computing_us(known: Sequence[PassPrediction], rows: int) -> float:
    largest, *smaller = known
    if not smaller:
        return largest.computing_us * rows / max(largest.rows, 1)
    pairs = zip(known, smaller, strict=False)
    above, below = next(((one, next_one) for one, next_one in pairs if rows >= next_one.rows), known[-2:])
    slope = (above.computing_us - below.computing_us) / (above.rows - below.rows)
    return max(0.0, below.computing_us + slope * (rows - below.rows))


@dataclass(frozen=True)
class StepPrediction:
    """Expected time of a step, and the share of it in which devices compute nothing."""

    step_us: float
    bubble: float


@dataclass(frozen=True)
class StagePlan:
    """A Stage.

    Attributes:
        modules: short names of what it runs.
        ranks: of its Replicas.
        recompute: what of each of its Blocks is computed again for the backward: ``"none"``, ``"block"``, or
            ``"stage"`` where all of the Stage is, together.
        sharding: what its Replicas divide among them.
        offload: its parameters lie on the host.
    """

    modules: tuple[str, ...]
    ranks: tuple[int, ...]
    recompute: tuple[str, ...]
    sharding: str
    offload: bool
    predicted: StagePrediction


@dataclass(frozen=True)
class PlanFacts:
    """A Plan, as far as it is read here.

    Attributes:
        schedule: a name, or ``listed``.
        eager_spans: hashes of the Spans that are not compiled.
        memory_budget_percent: how much of what a backward needs the others may keep; None: whatever they would.
    """

    world_size: int
    batch_rows: int
    microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    predicted: StepPrediction
    eager_spans: frozenset[str] = frozenset()
    memory_budget_percent: int | None = None

    @property
    def divides(self) -> bool:
        """Replicas of some Stage divide something among them."""
        return any(stage.sharding != "none" for stage in self.stages)

    @staticmethod
    def of(plan: Plan) -> PlanFacts:
        """Reads a Plan."""
        return PlanFacts.from_content(content(plan))

    @staticmethod
    def from_content(plan: dict[str, Any]) -> PlanFacts:
        """Reads the content of a plan file."""
        return PlanFacts(
            world_size=plan["world_size"],
            batch_rows=plan["batch_rows"],
            microbatches=plan["microbatches"],
            schedule=plan["schedule"] if isinstance(plan["schedule"], str) else "listed",
            stages=tuple(_stage(item) for item in plan["stages"]),
            predicted=StepPrediction(plan["predicted"]["step_us"], plan["predicted"]["bubble"]),
            eager_spans=frozenset(plan.get("eager_spans", ())),
            memory_budget_percent=plan.get("memory_budget_percent"),
        )


def content(plan: Plan) -> dict[str, Any]:
    """What the plan's file says."""
    found: dict[str, Any] = json.loads(plan.to_json())
    return found


def _stage(item: dict[str, Any]) -> StagePlan:
    predicted = item["predicted"]
    memory = predicted["memory"]
    return StagePlan(
        modules=tuple(item["modules"]),
        ranks=tuple(item["ranks"]),
        recompute=tuple(block["recompute"] for block in item["blocks"]),
        sharding=item["sharding"],
        offload=item["offload"],
        predicted=StagePrediction(
            forward_us=predicted["forward_us"],
            backward_us=predicted["backward_us"],
            reduce_us=predicted["reduce_us"],
            update_us=predicted["update_us"],
            memory=MemoryPrediction(**{name: memory[name] for name in MemoryPrediction.__dataclass_fields__}),
            sizes=tuple(
                PassPrediction(size["rows"], size["forward_us"], size["backward_us"])
                for size in predicted.get("sizes", ())
            ),
        ),
    )
