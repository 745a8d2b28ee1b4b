"""Layers that take dimension 0 for the steps of a sequence, as torch's do by default, where it has the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LAYERS = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_WITH_BATCH = 3
"""Dimensions of what has sequences, a batch and features."""


def runs_along_rows(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a call of such a layer with the rows in dimension 0."""
    if not isinstance(module, _LAYERS):
        return False
    holder = getattr(module, "self_attn", module)
    taken = next((item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)), None)
    if holder.batch_first or taken is None or taken.dim() != _WITH_BATCH:
        return False
    return isinstance(taken.shape[0], torch.SymInt)


ADVICE = (
    "runs along dimension 0, which has the rows of the batch: if those are in dimension 1, put them first "
    "(batch_first=True, or x.transpose(0, 1) of the arguments and back inside of the model)"
)
