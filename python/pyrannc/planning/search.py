"""What is asked of the core's search, of which this is the only caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrannc._native import Cluster, Plan, Profile
from pyrannc.call.variant import Variant
from pyrannc.config import Config
from pyrannc.core.settings import Capabilities, Limits, SearchSettings
from pyrannc.job import phases


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        variant: the captured model.
        samples: the tensors of the call that was captured.
        batch_rows: rows of the global batch.
        gather_inputs: the batch is all ranks' rows together, instead of rank 0's alone.
        zero: what Replicas may divide, as ``enable_zero`` of the configuration says it.
    """

    variant: Variant
    samples: Sequence[Tensor]
    config: Config
    optimizer: Optimizer | None
    device: torch.device
    batch_rows: int
    gather_inputs: bool
    zero: str = "off"


def search(
    request: Request, cluster: Cluster, profiles: Sequence[Profile], world_size: int, *, tells: bool = True
) -> Plan:
    """Searches the best Plan for the first ``world_size`` devices of a cluster.

    Args:
        tells: what there is to remark goes into the log.

    Raises:
        PlanError: nothing fits, or the configuration asks for what cannot be.
    """
    asked, linked = search_settings(request, world_size), with_links(cluster, profiles)
    plan, remark = Plan.search_with_remark(request.variant.graph, linked, list(profiles), asked.to_json())
    if remark and tells:
        phases.note(remark)
    return plan


def search_settings(request: Request, world_size: int) -> SearchSettings:
    """What the core is asked for."""
    config = request.config
    return SearchSettings(
        world_size=world_size,
        batch_rows=request.batch_rows,
        gather_inputs=request.gather_inputs,
        memory_limit_bytes=config.mem_limit_bytes,
        memory_margin=config.mem_margin,
        optimizer_bytes_per_param_byte=_state_bytes_per_param_byte(request.optimizer, config.opt_param_factor),
        stages=config.partition_num or None,
        max_stages=config.max_partition_num or None,
        microbatches=min(config.pipeline_num, request.batch_rows) or None,
        min_microbatches=config.min_pipeline,
        max_microbatches=config.max_pipeline,
        min_microbatch_rows=config.min_pipeline_bs,
        loss_inside=request.variant.loss_inside,
        replays=replays(request),
        split_backward=config.split_backward and not request.variant.whole_part,
        reduce_dtype=config.reduce_dtype,
        capabilities=Capabilities.of_zero(request.zero),
        limits=Limits(config.search_timeout_ms),
    )


def replays(request: Request) -> bool:
    """Whether steps are replayed as CUDA graphs, where nothing else is against it."""
    return request.config.records_on(request.device.type) and not request.variant.whole_part


def with_links(cluster: Cluster, profiles: Sequence[Profile]) -> Cluster:
    """The cluster with the links that were measured, if any were."""
    return cluster.with_links(profiles[0]) if profiles else cluster


def _state_bytes_per_param_byte(optimizer: Optimizer | None, default: float) -> float:
    """Optimizer state in bytes for each byte of a parameter.

    Args:
        optimizer: known classes of ``torch.optim`` are told from their settings.
        default: for other classes.
    """
    if optimizer is None:
        return 0.0
    groups = optimizer.param_groups
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return 3.0 if any(group.get("amsgrad") for group in groups) else 2.0
    if isinstance(optimizer, torch.optim.SGD):
        return 1.0 if any(group.get("momentum") for group in groups) else 0.0
    return default
