"""The devices of a job as their ranks tell of them, and the Cluster that they make."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyrannc._native import Cluster
from pyrannc.config import Config
from pyrannc.profile.conditions import device_name, uses_tf32


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


def in_words(number: int) -> str:
    """So many ranks."""
    return "1 rank" if number == 1 else f"{number} ranks"
