"""This process among the others: rank, device and process groups.

Nothing happens on import. The first use joins the job's processes; one process without a launcher is a job of its own.
A default process group that the program has made is used as it is.
"""

import atexit
import hashlib
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pyrannc import log
from pyrannc.errors import ConfigError, RaNNCError
from pyrannc.job import gloo_workers
from pyrannc.job.launch import Launch, detect_launch


@dataclass(frozen=True)
class Process:
    """This process, after it has joined the others.

    Attributes:
        rank: From 0.
        world_size: Number of processes.
        device: Where this rank computes.
        group: All ranks, for tensors on ``device``.
        control: All ranks, for objects and CPU tensors (Gloo).
        host: The name by which other ranks reach this process's host.
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    host: str


@dataclass
class _State:
    """The joined process, the default group it rests on, and what must be undone."""

    process: Process
    default_group: dist.ProcessGroup
    made_default: bool
    made_groups: tuple[dist.ProcessGroup, ...]


_state: _State | None = None
_joins = 0
_connecting: threading.Thread | None = None
_MOST_CONNECTING_S = 120.0


def ensure_process_group() -> Process:
    """Join the other processes if that has not happened yet. Collective over all processes.

    Raises:
        ConfigError: The launcher's environment is not enough to find the others.
        RaNNCError: This host has fewer CUDA devices than processes.
    """
    global _state
    joined = _joined()
    if joined is not None:
        return joined
    default_group = dist.group.WORLD if dist.is_initialized() else None
    start_s = time.monotonic()
    launch = detect_launch()
    log.configure(launch.rank if default_group is None else dist.get_rank())
    device = own_device()
    made_default = default_group is None
    gloo_workers.await_at_exit()
    if default_group is None:
        default_group = _join(launch, device)
    process, made_groups = _describe(launch, device, default_group)
    _state = _State(process, default_group, made_default, made_groups)
    by = "" if launch.launcher == "none" else f", started by {launch.launcher}"
    log.get_logger("RaNNCProcess").info(
        "join: %.2f s (rank %d of %d on %s%s)",
        time.monotonic() - start_s,
        process.rank,
        process.world_size,
        device,
        by,
    )
    return process


def _joined() -> Process | None:
    """This process among the others; None where it has not joined them, or their default group is another by now."""
    return _state.process if _state is not None and dist.group.WORLD is _state.default_group else None


def control() -> dist.ProcessGroup:
    """Return the Gloo group of all ranks, for exchange between hosts' memories. Joins the others if need be."""
    return ensure_process_group().control


def world() -> dist.ProcessGroup:
    """Return the group of all ranks that carries tensors on this rank's device. Joins the others if need be."""
    await_connection()
    return ensure_process_group().group


def begin_connecting() -> None:
    """Connect the GPUs of all ranks in the background, which NCCL does at its first message, in seconds. Collective.

    Only of a group that RaNNC has made: the program may use its own meanwhile.
    """
    global _connecting
    state = _state
    if state is None or not state.made_default or state.process.world_size == 1 or _connecting is not None:
        return
    process = state.process
    if process.device.type != "cuda":
        return

    def connect() -> None:
        # What fails here fails again where the group is used, and is told there.
        with suppress(Exception), torch.cuda.device(process.device):
            dist.broadcast(torch.zeros(1, device=process.device), 0, group=process.group)

    _connecting = threading.Thread(target=connect, name="connect the GPUs", daemon=True)
    _connecting.start()


def await_connection() -> None:
    """Wait for what :func:`begin_connecting` has begun; not for ever, as a rank may be gone."""
    if _connecting is not None:
        _connecting.join(_MOST_CONNECTING_S)


def get_rank() -> int:
    """Return this process's rank. Does not join the others."""
    joined = _joined()
    if joined is not None:
        return joined.rank
    return dist.get_rank() if dist.is_initialized() else detect_launch().rank


def get_world_size() -> int:
    """Return the number of processes. Does not join the others."""
    joined = _joined()
    if joined is not None:
        return joined.world_size
    return dist.get_world_size() if dist.is_initialized() else detect_launch().world_size


def all_ranks() -> tuple[int, ...]:
    """All of them, in order. Does not join the others."""
    return tuple(range(get_world_size()))


def barrier() -> None:
    """Wait until all processes have called this. Collective."""
    dist.barrier(group=control())


def clear() -> None:
    """Leave the other processes: destroy the process groups that RaNNC has made, and no others."""
    global _state, _connecting
    await_connection()
    state, _state, _connecting = _state, None, None
    if state is None or not dist.is_initialized() or dist.group.WORLD is not state.default_group:
        return
    if state.made_default:
        dist.destroy_process_group()
        return
    for group in state.made_groups:
        dist.destroy_process_group(group)


def own_device() -> torch.device:
    """Return where this process computes, and make it torch's current CUDA device. Does not join the others.

    Raises:
        ConfigError: A launcher's variable is missing or not a number.
        RaNNCError: This host has fewer CUDA devices than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    launch = detect_launch()
    if dist.is_initialized() and launch.launcher == "none":
        # Who makes a process group by hand chooses the device by hand too.
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if launch.local_rank >= count:
        raise RaNNCError(
            f"rank {launch.rank} is process {launch.local_rank} on its host, where it sees {count} CUDA device(s); "
            "start at most one process per device and let every process see all devices (CUDA_VISIBLE_DEVICES)"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


def _join(launch: Launch, device: torch.device) -> dist.ProcessGroup:
    """Make the default process group."""
    global _joins
    _joins += 1
    dist.init_process_group(
        _backend(device), store=_store(launch, _joins), rank=launch.rank, world_size=launch.world_size
    )
    group = dist.group.WORLD
    assert group is not None, "init_process_group has made it"
    return group


def _store(launch: Launch, turn: int) -> Any:
    """Where the processes find each other the ``turn``-th time: nobody meets what is left of the time before."""
    if launch.launcher == "none":
        return dist.HashStore()  # type: ignore[attr-defined] # public, though torch's types do not say so
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return dist.PrefixStore(f"rannc{turn}", _served_store(launch))  # type: ignore[attr-defined] # likewise
    if not launch.single_host or not launch.job:
        raise ConfigError(
            f"the {launch.world_size} processes that {launch.launcher} has started cannot find each other; give "
            "all of them MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) in the environment"
        )
    path = _rendezvous_file(launch, turn)
    if launch.rank == 0:
        atexit.register(path.unlink, missing_ok=True)
    return dist.FileStore(str(path), launch.world_size)  # type: ignore[attr-defined] # likewise


@cache
def _served_store(launch: Launch) -> Any:
    """The store that the process at MASTER_ADDR serves, as long as it lives."""
    store, _, _ = next(rendezvous(f"env://?rank={launch.rank}&world_size={launch.world_size}"))
    return store


def _rendezvous_file(launch: Launch, turn: int) -> Path:
    """A file name that the processes of this job agree on without talking, in a folder of this user alone."""
    folder = Path(tempfile.gettempdir()) / f"rannc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RaNNCError(f"{folder} must belong to this user and be closed to all others")
    return folder / hashlib.sha256(f"{launch.job} {turn}".encode()).hexdigest()[:32]


def _describe(
    launch: Launch, device: torch.device, default_group: dist.ProcessGroup
) -> tuple[Process, tuple[dist.ProcessGroup, ...]]:
    """The joined process and the groups made for it. Collective."""
    backends = dict(part.split(":") for part in dist.get_backend_config(default_group).split(","))
    made: list[dist.ProcessGroup] = []

    def new_group(backend: str) -> dist.ProcessGroup:
        made.append(dist.new_group(backend=backend))
        return made[-1]

    served = backends.get("cpu") == "gloo" and (device.type == "cpu" or backends.get("cuda") == "nccl")
    group = default_group if served else new_group(_backend(device))
    process = Process(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        group=group,
        # A group of its own, so that an exchange on the host never waits behind tensors.
        control=new_group("gloo"),
        host=_own_name(launch),
    )
    return process, tuple(made)


def _own_name(launch: Launch) -> str:
    one_host = launch.launcher != "none" and launch.single_host
    if dist.get_world_size() == 1 or one_host:
        return "127.0.0.1"
    if dist.get_rank() == 0 and "MASTER_ADDR" in os.environ:
        return os.environ["MASTER_ADDR"]
    return os.uname().nodename


def _backend(device: torch.device) -> str:
    """The backend of a group that carries tensors on ``device`` and on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
