"""Whether layers of the script average their gradients over the ranks by themselves."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from pyrannc.capture.torch_internals.gradients import any_is_fully_sharded
from pyrannc.errors import RaNNCError
from pyrannc.job import process

_FOUND = WeakIdKeyDictionary()
"""What was found of each tensor: whoever holds one is looked for among all objects, once."""


def averaged(leaves: Iterable[Tensor]) -> set[int]:
    """The ids of parameters of layers in ``DistributedDataParallel``, which gives them the mean of ranks' gradients.

    Raises:
        RaNNCError: layers that hold one divide their gradients in a way that cannot be followed.
    """
    leaves = list(leaves)
    new = {id(leaf): leaf for leaf in leaves if leaf not in _FOUND}
    if new:
        found = _looked_for(new)
        _FOUND.update({leaf: key in found for key, leaf in new.items()})
    return {id(leaf) for leaf in leaves if _FOUND[leaf]}


def _looked_for(leaves: Mapping[int, Tensor]) -> set[int]:
    if any_is_fully_sharded(leaves):
        raise RaNNCError(
            "an input of the model was computed by layers in FSDP, which divides their gradients by the number of "
            "ranks, though those that come back through the model are shares of the global batch's: leave the layers "
            "as they are, and have their parameters in the optimizer that you give to RaNNCModule"
        )
    held = dict[int, DistributedDataParallel]()
    # Those whose making has failed reduce nothing.
    whole = [
        ddp for ddp in gc.get_objects() if issubclass(type(ddp), DistributedDataParallel) and hasattr(ddp, "reducer")
    ]
    for ddp in whole:
        held |= dict.fromkeys(_reduced(ddp) & leaves.keys(), ddp)
    if any(ddp.process_group.size() != process.get_world_size() for ddp in held.values()):
        raise RaNNCError(
            "an input of the model was computed by layers in DistributedDataParallel over some of the ranks, whose "
            "gradients would have no sum over all: have them in a DistributedDataParallel of all ranks, or leave them "
            "as they are with their parameters in the optimizer that you give to RaNNCModule"
        )
    return set(held)


def _reduced(ddp: DistributedDataParallel) -> set[int]:
    ignored = ddp.parameters_to_ignore
    return {id(param) for name, param in ddp.module.named_parameters() if name not in ignored}
