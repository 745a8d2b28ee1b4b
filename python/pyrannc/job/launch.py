"""What ``torchrun``, Open MPI's ``mpirun`` and ``srun`` tell the processes that they start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pyrannc.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says.

    Attributes:
        launcher: ``"torchrun"``, ``"mpirun"``, ``"srun"`` or ``"none"``.
        rank: This process, from 0.
        world_size: Number of processes.
        local_rank: This process among those of its host, from 0.
        single_host: Whether all processes run on one host.
        job: Unique for each start of the launcher, the same in all its processes; empty if the launcher says nothing.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    single_host: bool = True
    job: str = ""


def detect_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the launcher's environment.

    Raises:
        ConfigError: A launcher's variable is missing or not a number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        launch = Launch(
            launcher="torchrun",
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            single_host=environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"],
        )
    elif "OMPI_COMM_WORLD_RANK" in environ:
        servers = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith("PMIX_SERVER_URI")]
        launch = Launch(
            launcher="mpirun",
            rank=_number(environ, "OMPI_COMM_WORLD_RANK"),
            world_size=_number(environ, "OMPI_COMM_WORLD_SIZE"),
            local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            single_host=environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environ.get("OMPI_COMM_WORLD_SIZE"),
            # The namespace holds the launcher's process id, which may come again; its ports hardly do at the same time.
            job=" ".join([environ.get("PMIX_NAMESPACE", ""), *servers]).strip(),
        )
    elif "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        # A batch script has SLURM_PROCID too, but is no step.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        launch = Launch(
            launcher="srun",
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, size),
            local_rank=_number(environ, "SLURM_LOCALID"),
            single_host=environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1",
            job=f"slurm {environ.get('SLURM_JOB_ID', '')} {environ['SLURM_STEP_ID']}",
        )
    else:
        return Launch()
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(f"{launch.launcher}'s environment gives rank {launch.rank} of {launch.world_size} processes")
    return launch


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    try:
        return int(text)  # type: ignore[arg-type] # None is among what int() rejects
    except (TypeError, ValueError):
        found = "is not set" if text is None else f"is {text!r}"
        raise ConfigError(f"the launcher's environment variable {name} must be a whole number, but {found}") from None
