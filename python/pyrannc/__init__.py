"""Automatic pipeline and data parallelism for unmodified PyTorch models.

``model = pyrannc.RaNNCModule(model, optimizer)`` is all that a training script needs; start it with ``torchrun``,
``mpirun`` or ``srun``.
"""

from pyrannc._native import version as __version__
from pyrannc.distributed import (
    DistributeModelParams,
    all_gather,
    barrier,
    clear,
    get_dist_param_range,
    get_rank,
    get_world_size,
    load_dist_param,
    recreate_all_communicators,
    set_dist_param,
    set_dist_param_dtype,
    show_deployment,
    store_dist_param,
)
from pyrannc.errors import (
    CaptureError,
    ConfigError,
    InputError,
    MismatchError,
    PeerError,
    PlanError,
    PlanFileError,
    RaNNCError,
)
from pyrannc.module import RaNNCModule
from pyrannc.settings import delay_grad_allreduce, keep_graph, sync_params_on_init

__all__ = [
    "CaptureError",
    "ConfigError",
    "DistributeModelParams",
    "InputError",
    "MismatchError",
    "PeerError",
    "PlanError",
    "PlanFileError",
    "RaNNCError",
    "RaNNCModule",
    "__version__",
    "all_gather",
    "barrier",
    "clear",
    "delay_grad_allreduce",
    "get_dist_param_range",
    "get_rank",
    "get_world_size",
    "keep_graph",
    "load_dist_param",
    "recreate_all_communicators",
    "set_dist_param",
    "set_dist_param_dtype",
    "show_deployment",
    "store_dist_param",
    "sync_params_on_init",
]
