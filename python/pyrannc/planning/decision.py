"""A Plan for all ranks: found on rank 0, or read from a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from pyrannc._native import Plan
from pyrannc.config import Config
from pyrannc.errors import PlanFileError
from pyrannc.job import agree, phases, process
from pyrannc.log import get_logger
from pyrannc.planning.attempts import Attempts
from pyrannc.planning.machine import RankDevice, find_cluster, in_words, own_device
from pyrannc.planning.measured import configured_profile, find_profiles
from pyrannc.planning.search import Request, search

_log = get_logger("DPStaging")


def decide(request: Request, plan_file: Path | None) -> Plan:
    """The Plan to run; all ranks call it.

    Args:
        plan_file: read the Plan from here instead of searching.

    Raises:
        PlanError: there is no Plan.
        PlanFileError: the file is damaged, or of another model or world size.
        ClusterError: the configured cluster file is damaged.
        ProfileError: the configured profile file is damaged, or of another model.
    """
    if plan_file is not None:

        def read() -> Plan:
            plan = Plan.read(plan_file)
            plan.check(request.variant.graph, process.get_world_size())
            phases.note(f"from {plan_file}")
            return plan

        found = _of_rank_0(read)
        assert isinstance(found, Plan), "it was read"
        return found
    ranks: list[RankDevice] = agree.gather_objects(own_device(request.device))
    cluster = agree.together(lambda: find_cluster(request.config, ranks))
    attempts, percent = Attempts(request, cluster), None
    while True:
        with phases.phase("DPStaging", "profile", "the measurement of Blocks and links"):
            profiles = find_profiles(request, cluster, [rank.host for rank in ranks], percent)
        found = _of_rank_0(partial(attempts.take, profiles, percent))
        if isinstance(found, Plan):
            return found
        percent = found


def _of_rank_0(find: Callable[[], Plan | int]) -> Plan | int:
    """What rank 0 finds, on all ranks: a Plan, or under which memory budget Spans are to be measured next."""
    first = process.get_rank() == 0

    def told() -> str | int | None:
        found = find() if first else None
        return found.to_json() if isinstance(found, Plan) else found

    with phases.phase("DPStaging", "plan", "the search for a Plan", busy=first):
        found: str | int = agree.broadcast_object(agree.together(told))
        return Plan.from_json(found) if isinstance(found, str) else found


def save_if_asked(plan: Plan, config: Config) -> None:
    """Writes the Plan of a training where the configuration says; what cannot be written ends no training."""
    if not config.save_deployment:
        return
    try:
        plan.write(config.deployment_file)
    except PlanFileError as error:
        _log.warning("%s. The training goes on; model.save_deployment(FILE) writes the plan later", error)


def dry_run(request: Request) -> NoReturn:
    """Plans for ``partitioning_dry_run_np`` ranks, shows and saves the Plan as configured, and ends the program.

    The ranks have devices like this one unless there is a cluster file. Each brings as many rows as the ranks of this
    start do on average. Nothing is measured. All ranks call it.

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
    own = own_device(request.device)
    ranks = [replace(own, host=f"node {rank // ranks_per_node}") for rank in range(world_size)]

    def show() -> None:
        profiles = [configured_profile(request)] if config.load_graph_profile else []
        plan = search(request, find_cluster(config, ranks), profiles, world_size)
        tables = plan.tables(config.mem_limit_bytes)
        _log.info("plan for %s (dry run, nothing is trained):\n%s", in_words(world_size), tables)
        if config.save_deployment and config.deployment_file:
            plan.write(config.deployment_file)

    agree.together(lambda: show() if process.get_rank() == 0 else None)
    raise SystemExit(0)
