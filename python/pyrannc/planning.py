"""From the configuration and the machine to a Plan: found on rank 0, or read from a file; the same on all ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
from torch.optim import Optimizer

from pyrannc import agree, process
from pyrannc._native import Graph, Plan
from pyrannc.config import Config
from pyrannc.log import get_logger
from pyrannc.runtime.optimizer import state_bytes_per_param_byte

_log = get_logger("DPStaging")


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        batch_rows: rows of the global batch.
        gather_inputs: the batch is all ranks' rows together, instead of rank 0's alone.
        loss_inside: the model returns its loss.
    """

    graph: Graph
    config: Config
    optimizer: Optimizer | None
    device: torch.device
    batch_rows: int
    gather_inputs: bool
    loss_inside: bool


def search(request: Request, world_size: int, ranks_per_node: int) -> Plan:
    """Searches the best Plan for ``world_size`` ranks, of which ``ranks_per_node`` share a host.

    Raises:
        PlanError: nothing fits, or the configuration asks for what cannot be.
    """
    config = request.config
    settings = {
        "world_size": world_size,
        "batch_rows": request.batch_rows,
        "gather_inputs": request.gather_inputs,
        "memory_limit_bytes": config.mem_limit_bytes or device_memory_bytes(request.device, ranks_per_node),
        "memory_margin": config.mem_margin,
        "optimizer_bytes_per_param_byte": state_bytes_per_param_byte(request.optimizer, config.opt_param_factor),
        "stages": config.partition_num or None,
        "max_stages": config.max_partition_num or None,
        "microbatches": min(config.pipeline_num, request.batch_rows) or None,
        "min_microbatches": config.min_pipeline,
        "max_microbatches": config.max_pipeline,
        "min_microbatch_rows": config.min_pipeline_bs,
        "loss_inside": request.loss_inside,
    }
    per_node = min(ranks_per_node, world_size)
    nodes = -(-world_size // per_node)
    return Plan.search(request.graph, device_name(request.device), nodes, per_node, json.dumps(settings))


def decide(request: Request, plan_file: Path | None) -> Plan:
    """The Plan to run; all ranks call it.

    Args:
        plan_file: read the Plan from here instead of searching.

    Raises:
        PlanError: there is no Plan.
        PlanFileError: the file is damaged, or of another model or world size.
    """
    ranks_per_node = count_ranks_per_node()
    world_size = process.get_world_size()

    def find() -> str | None:
        if process.get_rank() != 0:
            return None
        if plan_file is not None:
            plan = Plan.read(plan_file)
            plan.check(request.graph, world_size)
            _log.info("plan read from %s", plan_file)
            return plan.to_json()
        _log.info("searching a plan for %d ranks and a global batch of %d rows", world_size, request.batch_rows)
        return search(request, world_size, ranks_per_node).to_json()

    return Plan.from_json(agree.broadcast_object(agree.together(find)))


def dry_run(request: Request) -> NoReturn:
    """Plans for ``partitioning_dry_run_np`` ranks, shows and saves the Plan as configured, and ends the program.

    Each of those ranks brings as many rows as the ranks of this start do on average.

    Raises:
        SystemExit: always.
        PlanError: there is no Plan.
    """
    config = request.config
    world_size = config.partitioning_dry_run_np
    if request.gather_inputs:
        rows = -(-request.batch_rows * world_size // process.get_world_size())
        request = replace(request, batch_rows=rows)
    ranks_per_node = torch.cuda.device_count() if request.device.type == "cuda" else world_size
    plan = search(request, world_size, ranks_per_node)
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
