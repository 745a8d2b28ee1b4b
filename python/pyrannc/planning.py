"""From the configuration and the machine to a Plan: found on rank 0, or read from a file; the same on all ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import NoReturn

import torch
from torch.optim import Optimizer

from pyrannc import process
from pyrannc._native import Graph, Plan
from pyrannc.config import Config
from pyrannc.log import get_logger
from pyrannc.runtime import agree
from pyrannc.runtime.optimizer import state_bytes_per_param_byte

_log = get_logger("DPStaging")


def search(
    graph: Graph,
    config: Config,
    optimizer: Optimizer | None,
    device: torch.device,
    *,
    world_size: int,
    ranks_per_node: int,
    batch_rows: int,
    loss_inside: bool,
) -> Plan:
    """Searches the best Plan.

    Args:
        world_size: number of ranks to plan for.
        ranks_per_node: number of them that share a host.
        batch_rows: rows of the global batch.
        loss_inside: the model returns its loss.

    Raises:
        PlanError: nothing fits, or the configuration asks for what cannot be.
    """
    settings = {
        "world_size": world_size,
        "batch_rows": batch_rows,
        "memory_limit_bytes": config.mem_limit_bytes or device_memory_bytes(device, ranks_per_node),
        "memory_margin": config.mem_margin,
        "optimizer_bytes_per_param_byte": state_bytes_per_param_byte(optimizer, config.opt_param_factor),
        "stages": config.partition_num or None,
        "max_stages": config.max_partition_num or None,
        "microbatches": min(config.pipeline_num, batch_rows) or None,
        "min_microbatches": config.min_pipeline,
        "max_microbatches": config.max_pipeline,
        "min_microbatch_rows": config.min_pipeline_bs,
        "loss_inside": loss_inside,
    }
    per_node = min(ranks_per_node, world_size)
    nodes = -(-world_size // per_node)
    return Plan.search(graph, device_name(device), nodes, per_node, json.dumps(settings))


def decide(
    graph: Graph,
    config: Config,
    optimizer: Optimizer | None,
    device: torch.device,
    plan_file: Path | None,
    *,
    batch_rows: int,
    loss_inside: bool,
) -> Plan:
    """The Plan to run; all ranks call it.

    Args:
        plan_file: read the Plan from here instead of searching.

    Raises:
        PlanError: there is no Plan.
        PlanFileError: the file is damaged, or of another model or world size.
    """
    ranks_per_node = count_ranks_per_node()

    def find() -> str | None:
        if process.get_rank() != 0:
            return None
        if plan_file is not None:
            plan = Plan.read(plan_file)
            plan.check(graph, process.get_world_size())
            _log.info("plan read from %s", plan_file)
            return plan.to_json()
        _log.info("searching a plan for %d ranks and a global batch of %d rows", process.get_world_size(), batch_rows)
        found = search(
            graph,
            config,
            optimizer,
            device,
            world_size=process.get_world_size(),
            ranks_per_node=ranks_per_node,
            batch_rows=batch_rows,
            loss_inside=loss_inside,
        )
        return found.to_json()

    return Plan.from_json(agree.broadcast_object(agree.together(find)))


def dry_run(
    graph: Graph,
    config: Config,
    optimizer: Optimizer | None,
    device: torch.device,
    batch_rows: int,
    loss_inside: bool,
) -> NoReturn:
    """Plans for ``partitioning_dry_run_np`` ranks, shows and saves the Plan as configured, and ends the program.

    Raises:
        SystemExit: always.
        PlanError: there is no Plan.
    """
    world_size = config.partitioning_dry_run_np
    per_node = min(world_size, max(1, torch.cuda.device_count()))
    plan = search(
        graph,
        config,
        optimizer,
        device,
        world_size=world_size,
        ranks_per_node=per_node,
        batch_rows=batch_rows,
        loss_inside=loss_inside,
    )
    if process.get_rank() == 0:
        tables = plan.tables(config.mem_limit_bytes)
        _log.info("plan for %d ranks (dry run, nothing is trained):\n%s", world_size, tables)
        if config.save_deployment and config.deployment_file:
            plan.write(config.deployment_file)
    raise SystemExit(0)


def device_name(device: torch.device) -> str:
    """The name under which the core knows the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def count_ranks_per_node() -> int:
    """The least number of ranks on one host; all ranks call it."""
    hosts: list[str] = agree.gather_objects(os.uname().nodename)
    return min(Counter(hosts).values())


def device_memory_bytes(device: torch.device, ranks_per_node: int) -> int:
    """Memory that one rank can have: the GPU's, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_bytes // ranks_per_node
