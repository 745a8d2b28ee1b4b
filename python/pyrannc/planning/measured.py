"""What was measured for a search: Profiles, and under what conditions code is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from pyrannc._native import Blocks, Cluster, Profile
from pyrannc.blocks.compiler import Compiler
from pyrannc.blocks.kept import KeptCode
from pyrannc.config import Config
from pyrannc.core.partition import Parts
from pyrannc.errors import ProfileError
from pyrannc.files import write_atomically
from pyrannc.job import agree, phases, process
from pyrannc.log import get_logger
from pyrannc.planning.search import Request, replays
from pyrannc.profile.block import BlockSource
from pyrannc.profile.cache import ProfileCache, default_folder
from pyrannc.profile.conditions import Conditions, conditions, device_name
from pyrannc.profile.profiler import Runs, Subject, profile, row_counts

_log = get_logger("DPStaging")


def find_profiles(
    request: Request, cluster: Cluster, hosts: Sequence[str], memory_budget_percent: int | None = None
) -> list[Profile]:
    """The configured Profile, or one for each kind of device, or none where estimates are to serve.

    All ranks call it; only rank 0 gets the Profiles.

    Args:
        hosts: the host of each rank.
        memory_budget_percent: of what compiled Spans keep, as :class:`pyrannc.blocks.compiler.Compiler` has it.

    Raises:
        ProfileError: the configured file is damaged, or of another model.
    """
    config = request.config
    own_rank = process.get_rank()
    if config.load_graph_profile:
        return agree.together(lambda: [configured_profile(request)] if own_rank == 0 else [])
    if not measures(request):
        phases.note("nothing is measured: estimates serve")
        return []
    subject = agree.together(lambda: _subject(request, cluster, hosts, memory_budget_percent))
    folder = Path(config.profile_cache_dir) if config.profile_cache_dir else default_folder()
    profiles = profile(subject, request.device, ProfileCache(folder if config.profile_cache else None))
    if config.save_graph_profile and own_rank == 0 and memory_budget_percent is None:
        save_profile(profiles[0], Path(config.graph_profile_file))
    return profiles


def measures(request: Request) -> bool:
    """True where Blocks are measured, or have been by an earlier start."""
    config = request.config
    if config.load_graph_profile or config.profile == "never":
        return False
    return bool(config.profile == "always" or request.device.type != "cpu" or config.save_graph_profile)


def compiled_folder(config: Config) -> Path | None:
    """Where compiled code is kept; None where nothing is."""
    if not config.profile_cache:
        return None
    return (Path(config.profile_cache_dir) if config.profile_cache_dir else default_folder()) / "compiled"


def has_compiled(config: Config) -> bool:
    """True where an earlier start has kept compiled code, of whatever model."""
    folder = compiled_folder(config)
    return folder is not None and KeptCode(folder).holds_any


def conditions_of_code(device: torch.device, config: Config) -> Callable[[], Conditions]:
    """What compiled code depends on beside what it computes, as it is when it is asked for."""
    return partial(conditions, device, fused_dropout=config.fused_dropout, compiled=True)


def _subject(request: Request, cluster: Cluster, hosts: Sequence[str], memory_budget_percent: int | None) -> Subject:
    variant, world_size = request.variant, process.get_world_size()
    compiles = request.config.compiles_on(request.device.type)
    folder, own = compiled_folder(request.config), conditions_of_code(request.device, request.config)
    compiler = Compiler(request.device, folder, own, memory_budget_percent=memory_budget_percent) if compiles else None

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


def configured_profile(request: Request) -> Profile:
    """That of the file that the configuration names.

    Raises:
        ProfileError: it is damaged, or of another model.
    """
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


def save_profile(measured: Profile, path: Path) -> None:
    """Writes a Profile to a file; what cannot be written ends no training."""
    try:
        write_atomically(path, measured.to_json())
    except OSError as error:
        _log.warning("cannot write the profile to %s: %s. The training goes on", path, error)
        return
    phases.note(f"that of {measured.device} written to {path}")
