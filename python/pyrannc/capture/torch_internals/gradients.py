"""Backward, gradients and the optimizer's state."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from pyrannc.frozen import all_objects

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def home_of_state(param: Tensor, value: Tensor, key: Hashable, settings: Mapping[str, Any]) -> torch.device:
    """Where ``load_state_dict`` of torch's optimizers puts a tensor of a parameter's state. Public: none.

    Args:
        key: of the value in the state.
        settings: of the parameter's group.
    """
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    groups = [{**settings, "params": [0]}]
    return Optimizer._process_value_according_to_param_policy(param, empty, 0, groups, key).device


def call_first_after_steps(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> None:
    """Calls a hook after each step, before those that the optimizer has already. Public:
    ``register_step_post_hook``, which adds it behind them."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


_HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def take_hooks(optimizer: Optimizer) -> None:
    """Lets an optimizer whose ``__init__`` calls no ``super().__init__()`` take hooks on its steps and run them, as one
    that is unpickled does. Public: none."""
    own, cls = vars(optimizer), type(optimizer)
    for name in _HOOKS_OF_STEPS:
        if type(own.get(name)) is dict:
            # Handles of hooks have weak references to it.
            own[name] = OrderedDict(own[name])
        if not hasattr(cls, name) and not getattr(cls.step, "hooked", False):
            # Steps of others of its class look for hooks as well from now on.
            setattr(cls, name, OrderedDict())
    Optimizer.__setstate__(optimizer, {})


def kept_uncompiled(hook: _Hook) -> _Hook:
    """The same, run as it is where ``torch.compile`` compiles what calls it. Public: ``torch.compiler.disable``, which
    loads the compiler at once."""
    return cast(_Hook, _disable_dynamo(hook))


def frame_of_step() -> FrameType:
    """Of the optimizer's step whose hook calls this, past what keeps the compiler away from it. Public: none."""
    caller = sys._getframe(2)
    frame: FrameType | None = caller
    while frame is not None and frame.f_globals.get("__name__") != Optimizer.__module__:
        frame = frame.f_back
    return caller if frame is None else frame


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the backward that is running has come to its end. Public: none."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


tensor_hooks: Callable[[Tensor], tuple[Any, Any]] = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""Hooks on a tensor's gradient, before and after it is added; None or empty without. Public: none."""


def node_hooks(node: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Hooks on a node of autograd, behind it and before it, as they are at any time from now on. Public: none.

    torch keeps one dictionary of each kind, to which the handle of a hook leads.
    """
    behind, before = node.register_hook(_no_hook), node.register_prehook(_no_hook)
    found = behind.hooks_dict_ref(), before.hooks_dict_ref()
    behind.remove()
    before.remove()
    return found


def _no_hook(*_: Any) -> None:
    """Is taken off at once."""


copy_each = torch._foreach_copy_
"""Copies tensors into others, in one kernel."""

add_each = torch._foreach_add_
"""Adds tensors to others, in one kernel."""


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor, in few kernels, and in float32 if its elements have less. Public: none, but for
    that of all together (``torch.nn.utils.get_total_norm``)."""
    found: dict[int, Tensor] = {}
    # Where types differ, there is a kernel for each tensor.
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        made = torch.float32 if dtype.itemsize < 4 else None
        found.update(zip(places, torch._foreach_norm([tensors[place] for place in places], 2, dtype=made), strict=True))
    return [found[place] for place in range(len(tensors))]


def runs_in_backward(node: Any) -> bool:
    """Inside of a backward: true when it runs this node."""
    runs: bool = torch._C._will_engine_execute_node(node)
    return runs


def leaf_runs_in_backward(node: Any) -> bool:
    """Inside of a backward: true when the leaf of this node gets a gradient, which ``autograd.grad`` may return."""
    try:
        return runs_in_backward(node)
    except RuntimeError as error:
        if "leaf node" not in str(error):
            raise
        return True


def backward_keeps_graph() -> bool:
    """Inside of a backward: true when it has been called with ``retain_graph=True``."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def graph_task() -> int:
    """Inside of a backward: its number."""
    number: int = torch._C._current_graph_task_id()
    return number


def any_is_fully_sharded(leaves: Mapping[int, Tensor]) -> bool:
    """True if layers in FSDP compute with one of these, given by id, in the place of a parameter. Public: none."""
    if any(getattr(leaf, "_is_flat_param", False) for leaf in leaves.values()):
        return True
    # Where nobody has imported it, there are no such layers.
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kind = getattr(module, "FSDPParam", None)
    owners = [] if kind is None else [item for item in all_objects() if type(item) is kind]
    return any(id(getattr(owner, "_unsharded_param", None)) in leaves for owner in owners)
