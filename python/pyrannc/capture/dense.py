"""Tensors that are more than numbers at strides, which a trace cannot follow: refused with what to do instead."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyrannc.errors import CaptureError, InputError

from .torch_internals.tensors import DisableTorchFunctionSubclass, base_of

_MADE_INSIDE = "make it in a sub-module where it is used (torch.sparse_coo_tensor), which then stays whole"


def refuse_inputs_not_dense(tensors: list[Tensor]) -> None:
    """Raises InputError for the first of the arguments' tensors that is not dense."""
    for index, tensor in enumerate(tensors):
        if _is_dense(tensor):
            continue
        if tensor.is_nested:
            raise InputError(
                f"tensor {index} of the arguments is nested: pad it (torch.nested.to_padded_tensor), and give the "
                "lengths as another tensor"
            )
        what = f"tensor {index} of the arguments (shape {tuple(tensor.shape)}) is"
        if tensor.layout == torch.strided:
            raise InputError(f"{what} a view of a sparse tensor: pass a copy of it (x.clone())")
        raise InputError(
            f"{what} sparse ({tensor.layout}): give the model copies of its indices and its values instead "
            f"(x.coalesce().indices().clone(), x.coalesce().values().clone()), and {_MADE_INSIDE}"
        )


def refuse_state_not_dense(model: nn.Module) -> None:
    """Raises CaptureError for the first parameter or buffer that is not dense."""
    named: list[tuple[str, Tensor]] = [(f'parameter "{name}"', param) for name, param in model.named_parameters()]
    named += [(f'buffer "{name}"', tensor) for name, tensor in model.named_buffers()]
    for what, tensor in named:
        if not _is_dense(tensor):
            kind = "nested" if tensor.is_nested else f"sparse ({tensor.layout})"
            raise CaptureError(
                f"{what} of the model is {kind}, which cannot be captured: keep its indices and its values, each a "
                f"buffer of its own, and {_MADE_INSIDE}"
            )


def _is_dense(tensor: Tensor) -> bool:
    with DisableTorchFunctionSubclass():
        found = (tensor, base_of(tensor))
        return all(item is None or (not item.is_nested and item.layout == torch.strided) for item in found)
