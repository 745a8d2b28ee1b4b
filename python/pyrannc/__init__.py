"""Automatic pipeline and data parallelism for unmodified PyTorch models.

``model = pyrannc.RaNNCModule(model, optimizer)`` is all that a training script needs; start it with ``torchrun``,
``mpirun`` or ``srun``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyrannc._native import version as __version__
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
from pyrannc.switches import delay_grad_allreduce, keep_graph, sync_params_on_init

if TYPE_CHECKING:
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
    from pyrannc.module import RaNNCModule

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # What needs torch is imported at first use: the rannc command does without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module("pyrannc.module" if name == "RaNNCModule" else "pyrannc.distributed")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"pyrannc.{name} needs PyTorch: pip install torch", name="torch") from None
    value = globals()[name] = getattr(home, name)
    return value
