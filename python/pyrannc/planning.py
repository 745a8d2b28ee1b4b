"""From the configuration and the machine to a Plan: found on rank 0, or read from a file; the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyrannc._native import Blocks, Cluster, Plan, Profile
from pyrannc.blocks.compiler import Compiler
from pyrannc.call.variant import Variant
from pyrannc.config import Config
from pyrannc.core.partition import Parts
from pyrannc.core.settings import Capabilities, Limits, SearchSettings
from pyrannc.errors import PlanFileError, ProfileError
from pyrannc.files import write_atomically
from pyrannc.job import agree, phases, process
from pyrannc.log import get_logger
from pyrannc.profile.block import BlockSource
from pyrannc.profile.cache import ProfileCache, default_folder
from pyrannc.profile.conditions import Conditions, conditions, device_name, uses_tf32
from pyrannc.profile.profiler import Runs, Subject, profile, row_counts

_log = get_logger("DPStaging")


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


@dataclass(frozen=True)
class RankDevice:
    """What a rank says of itself: the core's ``RankDevice``.

    Attributes:
        name: of its device, as torch has it.
        memory_bytes: of the device; for the host's processor, of the host.
        tf32: float32 matrix products use TF32.
        host: name of its host.
    """

    name: str
    memory_bytes: int
    tf32: bool
    host: str


def search(request: Request, cluster: Cluster, profiles: Sequence[Profile], world_size: int) -> Plan:
    """Searches the best Plan for the first ``world_size`` devices of a cluster.

    Raises:
        PlanError: nothing fits, or the configuration asks for what cannot be.
    """
    asked, linked = search_settings(request, world_size), with_links(cluster, profiles)
    plan, remark = Plan.search_with_remark(request.variant.graph, linked, list(profiles), asked.to_json())
    if remark:
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
    world_size = process.get_world_size()
    if plan_file is not None:

        def find() -> str:
            plan = Plan.read(plan_file)
            plan.check(request.variant.graph, world_size)
            phases.note(f"from {plan_file}")
            return plan.to_json()

    else:
        ranks: list[RankDevice] = agree.gather_objects(own_device(request.device))
        cluster = agree.together(lambda: find_cluster(request.config, ranks))
        with phases.phase("DPStaging", "profile", "the measurement of Blocks and links"):
            profiles = find_profiles(request, cluster, [rank.host for rank in ranks])

        def find() -> str:
            phases.note(f"searched for {_ranks(world_size)} and a global batch of {request.batch_rows} rows")
            return search(request, cluster, profiles, world_size).to_json()

    first = process.get_rank() == 0
    with phases.phase("DPStaging", "plan", "the search for a Plan", busy=first):
        return Plan.from_json(agree.broadcast_object(agree.together(lambda: find() if first else None)))


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
        profiles = [_configured_profile(request)] if config.load_graph_profile else []
        plan = search(request, find_cluster(config, ranks), profiles, world_size)
        tables = plan.tables(config.mem_limit_bytes)
        _log.info("plan for %s (dry run, nothing is trained):\n%s", _ranks(world_size), tables)
        if config.save_deployment and config.deployment_file:
            plan.write(config.deployment_file)

    agree.together(lambda: show() if process.get_rank() == 0 else None)
    raise SystemExit(0)


def own_device(device: torch.device) -> RankDevice:
    """What this rank says of itself."""
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return RankDevice(device_name(device), memory_bytes, uses_tf32(device), os.uname().nodename)


def find_cluster(config: Config, ranks: Sequence[RankDevice]) -> Cluster:
    """The configured cluster, or the one that ``ranks`` make.

    Raises:
        ClusterError: the configured file is damaged.
    """
    if config.cluster_file:
        return Cluster.read(config.cluster_file)
    hosts = [rank.host for rank in ranks]

    def memory_bytes(rank: RankDevice) -> int:
        """Ranks that compute on the host share its memory."""
        return rank.memory_bytes // hosts.count(rank.host) if rank.name == "cpu" else rank.memory_bytes

    return Cluster.of_ranks([(rank.name, memory_bytes(rank), rank.tf32, rank.host) for rank in ranks])


def find_profiles(request: Request, cluster: Cluster, hosts: Sequence[str]) -> list[Profile]:
    """The configured Profile, or one for each kind of device, or none where estimates are to serve.

    All ranks call it; only rank 0 gets the Profiles.

    Args:
        hosts: the host of each rank.

    Raises:
        ProfileError: the configured file is damaged, or of another model.
    """
    config = request.config
    own_rank = process.get_rank()
    if config.load_graph_profile:
        return agree.together(lambda: [_configured_profile(request)] if own_rank == 0 else [])
    measures = config.profile == "always" or request.device.type != "cpu" or config.save_graph_profile
    if config.profile == "never" or not measures:
        phases.note("nothing is measured: estimates serve")
        return []
    subject = agree.together(lambda: _subject(request, cluster, hosts))
    folder = Path(config.profile_cache_dir) if config.profile_cache_dir else default_folder()
    profiles = profile(subject, request.device, ProfileCache(folder if config.profile_cache else None))
    if config.save_graph_profile and own_rank == 0:
        _save_profile(profiles[0], Path(config.graph_profile_file))
    return profiles


def compiled_folder(config: Config) -> Path | None:
    """Where compiled code is kept; None where nothing is."""
    if not config.profile_cache:
        return None
    return (Path(config.profile_cache_dir) if config.profile_cache_dir else default_folder()) / "compiled"


def conditions_of_code(device: torch.device, config: Config) -> Callable[[], Conditions]:
    """What compiled code depends on beside what it computes, as it is when it is asked for."""
    return partial(conditions, device, fused_dropout=config.fused_dropout, compiled=True)


def _subject(request: Request, cluster: Cluster, hosts: Sequence[str]) -> Subject:
    variant, world_size = request.variant, process.get_world_size()
    compiles = request.config.compiles_on(request.device.type)
    folder, own = compiled_folder(request.config), conditions_of_code(request.device, request.config)
    compiler = Compiler(request.device, folder, own) if compiles else None

    def runs(blocks: Blocks) -> Runs:
        parts = Parts.from_json(blocks.partition_json())
        fused = request.config.fused_dropout
        given = request.samples, variant.starts, fused, compiler, replays(request)
        return Runs(blocks, parts, BlockSource(variant.captured, variant.facts, parts.crossings, *given))

    return Subject(
        graph_hash=variant.graph.hash(),
        blocks=runs(variant.graph.blocks()),
        spans=runs(variant.graph.spans()),
        row_counts=row_counts(request.batch_rows, world_size),
        hosts=tuple(hosts),
        level_names=tuple(cluster.level_names),
        optimizer=request.optimizer,
    )


def _configured_profile(request: Request) -> Profile:
    path = request.config.graph_profile_file
    found = Profile.read(path)
    if found.graph_hash != request.variant.graph.hash():
        raise ProfileError(
            f"the profile in {path} was measured for another model, or for other shapes of its inputs; measure again "
            "(without load_graph_profile)"
        )
    if found.device != device_name(request.device):
        _log.warning("the profile in %s was measured on %s, not on the devices here", path, found.device)
    phases.note(f"from {path}")
    return found


def _save_profile(measured: Profile, path: Path) -> None:
    try:
        write_atomically(path, measured.to_json())
    except OSError as error:
        _log.warning("cannot write the profile to %s: %s. The training goes on", path, error)
        return
    phases.note(f"that of {measured.device} written to {path}")


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
