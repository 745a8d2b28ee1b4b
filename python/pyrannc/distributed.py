"""Process-level functions of the public API."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import Tensor, dtype

from pyrannc._native import Plan
from pyrannc.counting import asked
from pyrannc.errors import RaNNCError
from pyrannc.job import faults, process
from pyrannc.job.faults import collective
from pyrannc.job.process import get_rank

__all__ = [
    "DistributeModelParams",
    "all_gather",
    "barrier",
    "clear",
    "get_dist_param_range",
    "get_rank",
    "get_world_size",
    "load_dist_param",
    "recreate_all_communicators",
    "set_dist_param",
    "set_dist_param_dtype",
    "show_deployment",
    "store_dist_param",
]


def get_world_size() -> int:
    """Returns the number of processes; does not join the others.

    Raises:
        CaptureError: a forward asks, which runs as in one process.
    """
    return asked(process.get_world_size())


def all_gather(ten: Tensor, buf: Tensor) -> None:
    """Fills ``buf`` with every rank's ``ten``, in rank order. All ranks call it.

    Args:
        ten: any shape, the same on all ranks.
        buf: ``world size`` times as many elements, same type and device.

    Raises:
        RaNNCError: the sizes or types do not fit.
    """
    ranks = process.get_world_size()
    if buf.numel() != ten.numel() * ranks or buf.dtype != ten.dtype:
        raise RaNNCError(
            f"all_gather of {ten.numel()} elements of {ten.dtype} over {ranks} ranks needs a buffer of "
            f"{ten.numel() * ranks} such elements, not {buf.numel()} of {buf.dtype}"
        )
    with collective("all_gather(...)"):
        group = process.world()
        dist.all_gather_into_tensor(buf.view(-1), ten.contiguous().view(-1), group=group)


def barrier() -> None:
    """Waits until all ranks have called this."""
    with collective("barrier()"):
        process.barrier()


def clear() -> None:
    """Leaves the other processes: destroys the process groups that RaNNC has made, and no others."""
    faults.leave()
    process.clear()


def recreate_all_communicators() -> None:
    """Leaves the other processes and joins them again; undeploy all modules before. All ranks call it."""
    clear()
    process.ensure_process_group()


def show_deployment(path: str | Path, batch_size: int) -> None:
    """Prints the Stages, ranks and microbatch sizes of a saved Plan; needs no module, no launcher and no GPU.

    Args:
        path: a plan file.
        batch_size: rows of the global batch.

    Raises:
        PlanFileError: the file is damaged or of another version.
    """
    print(Plan.read(str(path)).deployment(batch_size))


def _unavailable(name: str) -> RaNNCError:
    return RaNNCError(
        f"{name} is not available yet: models are built whole on every host, and only their owners hold parameters on "
        "the device"
    )


class DistributeModelParams:
    """Building a model that no single host can hold; not available yet.

    Raises:
        RaNNCError: always.
    """

    def __init__(self, enable: bool = True) -> None:
        raise _unavailable("DistributeModelParams")


def store_dist_param(param: Tensor) -> int:
    """Not available yet, like :class:`DistributeModelParams`."""
    raise _unavailable("store_dist_param")


def load_dist_param(param_id: int) -> Tensor:
    """Not available yet, like :class:`DistributeModelParams`."""
    raise _unavailable("load_dist_param")


def set_dist_param(param_id: int, param: Tensor) -> None:
    """Not available yet, like :class:`DistributeModelParams`."""
    raise _unavailable("set_dist_param")


def get_dist_param_range(param_id: int) -> tuple[int, int]:
    """Not available yet, like :class:`DistributeModelParams`."""
    raise _unavailable("get_dist_param_range")


def set_dist_param_dtype(param_id: int, param_dtype: dtype) -> None:
    """Not available yet, like :class:`DistributeModelParams`."""
    raise _unavailable("set_dist_param_dtype")
