"""What other tools put round a model before it comes to RaNNC."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pyrannc.capture.torch_internals.modules import compiled_module, drop_compiled_call, is_compiled
from pyrannc.errors import RaNNCError
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without ``torch.compile``, which is said once.

    Raises:
        RaNNCError: the model, or a part of it, is wrapped in what spreads it over processes or devices.
    """
    for path, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            where = f'sub-module "{path}"' if path else "the model"
            kind = type(module).__name__
            raise RaNNCError(
                f"{where} is wrapped in {kind}, whose place RaNNC takes: leave out {kind}, and give "
                "RaNNCModule the model"
            )
    compiled = is_compiled(model)
    inner = compiled_module(model) if compiled else model
    compiled = drop_compiled_call(inner) or compiled
    if compiled:
        _log.warning(
            "torch.compile has no effect on a model that RaNNC runs: Stages run the model's operators as they are; "
            "leave it out"
        )
    return inner
