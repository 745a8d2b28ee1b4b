"""Tensors that are more than numbers at strides, which a trace cannot follow: refused with what to do instead."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.tensors import DisableTorchFunctionSubclass, base_of
from pyrannc.errors import CaptureError


def why_not_dense(tensor: Tensor) -> str:
    """What a tensor is, and what to do instead; empty if it is dense."""
    with DisableTorchFunctionSubclass():
        base = base_of(tensor)
        if tensor.is_nested:
            return "nested: pad it (torch.nested.to_padded_tensor), and have the lengths as another tensor"
        if tensor.layout != torch.strided:
            return (
                f"sparse ({tensor.layout}): have copies of its indices and its values instead "
                "(x.coalesce().indices().clone(), x.coalesce().values().clone()), and make it in a sub-module where it "
                "is used (torch.sparse_coo_tensor), which then stays whole"
            )
        if base is not None and (base.is_nested or base.layout != torch.strided):
            return "a view of a sparse or nested tensor: have a copy of it instead (x.clone())"
    return ""


def refuse_state_not_dense(model: nn.Module) -> None:
    """Raises CaptureError for the first parameter or buffer that is not dense."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            why = why_not_dense(tensor)
            if why:
                raise CaptureError(f'{kind} "{name}" of the model is {why}')
