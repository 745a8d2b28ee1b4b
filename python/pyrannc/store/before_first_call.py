"""Steps with gradients of a wrapped model that was never called: each rank would train on its own rows."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyrannc.capture.torch_internals.gradients import kept_uncompiled
from pyrannc.errors import RaNNCError
from pyrannc.job import process

_never_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def watch_until_called(module: nn.Module) -> None:
    """From now on steps with gradients of what a RaNNCModule wraps raise, where there are other ranks.

    But for parameters of another one that is called.
    """
    _watch_steps()
    if not any(_share(module, other) for other in _called):
        _never_called.add(module)


def note_called(module: nn.Module) -> None:
    """All ranks call a RaNNCModule: gradients of what it wraps are those of the global batch from now on."""
    _called.add(module)
    for other in [each for each in _never_called if _share(module, each)]:
        _never_called.discard(other)


def _share(module: nn.Module, other: nn.Module) -> bool:
    own = set(map(id, module.parameters()))
    return not own.isdisjoint(map(id, other.parameters()))


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


@kept_uncompiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not _never_called or process.get_world_size() == 1:
        return
    grads = {id(param): param.grad for group in optimizer.param_groups for param in group["params"]}
    for module in list(_never_called):
        for name, param in module.named_parameters():
            grad = grads.get(id(param))
            # With gradients of zeros, some make an optimizer's state before they load one.
            if grad is not None and (grad.is_sparse or grad.any()):
                raise RaNNCError(
                    f'optimizer.step() would train parameter "{name}" on what each rank has by itself: the model is '
                    "wrapped, but what RaNNCModule has made was never called, and nothing else is spread over the "
                    "ranks, other methods of the model included. Have the model's forward do what the script calls "
                    "(self.log_prob(x), say), and call model(...); to train the plain model before, wrap it after that"
                )
