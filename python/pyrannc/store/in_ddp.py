"""Layers of the script that average their gradients over the ranks by themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from pyrannc.capture.torch_internals.gradients import any_is_fully_sharded
from pyrannc.errors import RaNNCError
from pyrannc.frozen import all_objects
from pyrannc.job import process

_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_of_no_fsdp = WeakIdKeyDictionary()
_leading = WeakIdKeyDictionary()


def in_ddp(leaves: Iterable[Tensor]) -> set[int]:
    """The ids of parameters of layers in ``DistributedDataParallel``, which gives them the mean of ranks' gradients.

    Raises:
        RaNNCError: layers that hold one divide their gradients in a way that cannot be followed.
    """
    ids = {id(leaf) for leaf in leaves}
    # Those whose making has failed reduce nothing.
    held = {ddp: _reduced(ddp) & ids for ddp in _all_made() if hasattr(ddp, "reducer")}
    if any(found and ddp.process_group.size() != process.get_world_size() for ddp, found in held.items()):
        raise RaNNCError(
            "layers of the script are in DistributedDataParallel over some of the ranks, so their gradients have no "
            "sum over all: have them in a DistributedDataParallel of all ranks, or leave them as they are with their "
            "parameters in the optimizer that you give to RaNNCModule"
        )
    return set().union(*held.values())


def refuse_fsdp(leaves: Iterable[Tensor]) -> None:
    """Raises RaNNCError of layers in FSDP, given what they compute with."""
    new = {id(leaf): leaf for leaf in leaves if leaf not in _of_no_fsdp}
    if not new:
        return
    if any_is_fully_sharded(new):
        raise RaNNCError(
            "an input of the model was computed by layers in FSDP, which divides their gradients by the number of "
            "ranks, though those that come back through the model are shares of the global batch's: leave the layers "
            "as they are, and have their parameters in the optimizer that you give to RaNNCModule"
        )
    _of_no_fsdp.update(dict.fromkeys(new.values(), True))


def note_leading(leaves: Iterable[Tensor]) -> None:
    """These get a gradient through a model, that of the global batch."""
    _leading.update(dict.fromkeys(leaves, True))


def leads_into_a_model(leaf: Tensor) -> bool:
    """True for what :func:`note_leading` was told of."""
    return leaf in _leading


def _reduced(ddp: DistributedDataParallel) -> set[int]:
    ignored = ddp.parameters_to_ignore
    return {id(param) for name, param in ddp.module.named_parameters() if name not in ignored}


def _all_made() -> list[DistributedDataParallel]:
    _watch_making()
    return list(_made)


@cache
def _watch_making() -> None:
    def note(module: nn.Module, name: str, submodule: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            _made.add(module)

    register_module_module_registration_hook(note)
    _made.update(item for item in all_objects() if issubclass(type(item), DistributedDataParallel))
