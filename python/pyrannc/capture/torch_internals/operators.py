"""Operators, and what nodes have for targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator as _HigherOrderOperator
from torch._ops import OpOverload as _OpOverload
from torch.amp import autocast_mode

OpOverload = _OpOverload
"""An operator for given types of its operands, as nodes have it for target. Public: ``torch.ops``, without the type."""

HigherOrderOperator = _HigherOrderOperator
"""``cond``, ``while_loop`` and the like, which are refused. Public: none."""


def schema(op: _OpOverload) -> torch.FunctionSchema:
    """What an operator takes, returns, writes and aliases. Public: none."""
    return op._schema


def overload_name(op: _OpOverload) -> str:
    """``"Tensor"`` of ``add.Tensor``. Public: the end of ``str(op)``."""
    return op._overloadname


def autocast_kernel(op: _OpOverload, kind: str) -> Callable[..., Any] | None:
    """What ``torch.autocast`` runs in an operator's place where it is on: conversions, and the operator again.

    None where there is no such thing, or autocast is off for this type of device. Public: none.

    Args:
        kind: type of device.
    """
    key = _AUTOCAST_KEYS[kind]
    off = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    if off or not torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key):
        return None
    return partial(op.redispatch, torch._C.DispatchKeySet(key))


_AUTOCAST_KEYS = {"cuda": torch._C.DispatchKey.AutocastCUDA, "cpu": torch._C.DispatchKey.AutocastCPU}


def decomposition(op: _OpOverload) -> Callable[..., Any] | None:
    """What makes an operator of others that autograd knows; None where it is one of these itself. Public: none."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    made = key in op.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key)
    return op.decompose if made else None


def safe_softmax(scores: Tensor) -> Tensor:
    """The softmax of the last dimension, zeros where all is minus infinity. Public: none; attention has it inside."""
    made: Tensor = torch.ops.aten._safe_softmax.default(scores, -1)
    return made


def assert_on_device(truth: Tensor, text: str) -> None:
    """Fails if a tensor is false, without waiting for the device to know. Public: none."""
    torch._assert_async(truth, text)


SET_GRAD_ENABLED: Callable[[bool], None] = torch._C._set_grad_enabled
"""The node that a trace holds for ``torch.no_grad()``; also the quickest switch in generated code. Public: the class
``torch.set_grad_enabled``."""

ENTER_AUTOCAST = autocast_mode._enter_autocast
"""The node that opens an autocast region. Public: ``torch.autocast``, which leaves this node."""

EXIT_AUTOCAST = autocast_mode._exit_autocast
"""The node that closes an autocast region. Public: likewise."""

flex_attention_operator = torch.ops.higher_order.flex_attention
"""Attention whose scores functions change and mask; it takes what these read. Public: ``flex_attention``."""


def flex_attention_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors like its results: what attention gives, the logarithm of the sum, the largest score. Public: none."""
    from torch._higher_order_ops.flex_attention import _permute_strides

    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    lines = [query.new_empty(query.shape[:-1], dtype=exact) for _ in range(2)]
    out = _permute_strides(query.new_empty((*query.shape[:-1], value.shape[-1])), query.stride())
    return out, lines[0], lines[1]


def lookup() -> Callable[[Tensor, list[Tensor]], Tensor]:
    """Gives an element of a table, by numbers in tensors; its gradient can be had inside of attention. Public: none."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index

    return mod_index  # type: ignore[no-any-return]
