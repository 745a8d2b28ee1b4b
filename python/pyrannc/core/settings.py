"""What a search for a Plan is asked for.

The classes mirror the core's JSON (crates/search: ``Settings``).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Capabilities:
    """What Plans may use to save memory.

    Attributes:
        recompute: computing parts of a forward again for the backward.
        sharding: the most that Replicas may divide among them: "none", "optimizer", "gradients", "kept_params" or
            "params", each with those before it.
        least_sharding: the least that several Replicas of a Stage divide.
    """

    recompute: bool = False
    sharding: str = "none"
    least_sharding: str = "none"

    @staticmethod
    def of_zero(level: str) -> Capabilities:
        """What ``enable_zero`` of the configuration asks for."""
        if level == "auto":
            return Capabilities(sharding="params")
        if level == "3":
            return Capabilities(sharding="params", least_sharding="kept_params")
        name = {"off": "none", "1": "optimizer", "2": "gradients"}[level]
        return Capabilities(sharding=name, least_sharding=name)


@dataclass(frozen=True)
class Limits:
    """Where a search stops with the best that it has found so far.

    Attributes:
        time_ms: time for the whole search; ``None`` is no limit.
    """

    time_ms: int | None = None


@dataclass(frozen=True)
class SearchSettings:
    """What a Plan must fulfil; ``None`` leaves a choice free, or to the core's default.

    Attributes:
        world_size: number of ranks.
        batch_rows: rows of the global batch.
        gather_inputs: the batch comes from all ranks; otherwise rank 0 has all rows.
        memory_limit_bytes: memory of each device.
        memory_margin: share of it to leave free.
        optimizer_bytes_per_param_byte: optimizer state for each byte of a trainable parameter.
        stages: number of Stages.
        max_stages: most Stages.
        replicas: Replicas of each Stage.
        microbatches: number of microbatches.
        min_microbatches: least microbatches.
        max_microbatches: most microbatches.
        min_microbatch_rows: least rows of a microbatch.
        loss_inside: the model returns its loss, so that forwards and backwards may be interleaved.
        replays: accelerators replay their work of a step, so that their hosts take no time to start it.
        split_backward: the backward of a microbatch may come in two parts.
        reduce_dtype: type in which gradients are summed over ranks: "float32", "bfloat16" or "param".
        capabilities: what Plans may use to save memory.
        limits: where to stop early.
        runners_up: number of other good Plans beside the best.
    """

    world_size: int
    batch_rows: int
    gather_inputs: bool | None = None
    memory_limit_bytes: int | None = None
    memory_margin: float | None = None
    optimizer_bytes_per_param_byte: float | None = None
    stages: int | None = None
    max_stages: int | None = None
    replicas: tuple[int, ...] | None = None
    microbatches: int | None = None
    min_microbatches: int | None = None
    max_microbatches: int | None = None
    min_microbatch_rows: int | None = None
    loss_inside: bool | None = None
    replays: bool | None = None
    split_backward: bool | None = None
    reduce_dtype: str | None = None
    capabilities: Capabilities | None = None
    limits: Limits | None = None
    runners_up: int | None = None

    def to_json(self) -> str:
        """The core's ``Settings``."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})
