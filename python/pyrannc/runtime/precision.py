"""In which types a captured call computes, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from pyrannc.call.variant import Variant
from pyrannc.store.buckets import SumTypes

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d")


def precision(variant: Variant, sums: SumTypes, replicas: int) -> str:
    """The types of parameters, products, and sums of gradients over ranks.

    Args:
        replicas: the most that a Stage has.
    """
    whole = variant.whole
    params = [whole.facts.values[param.value].dtype for param in whole.facts.params]
    trained = [whole.facts.values[param.value].dtype for param in whole.facts.params if _trains(variant, param.value)]
    products = [
        whole.facts.values[op.results[0]].dtype
        for op, node in zip(whole.facts.ops, whole.captured.op_nodes, strict=True)
        if op.results and str(getattr(node.target, "__name__", "")).partition(".")[0] in (*_PRODUCTS, *_CONVOLUTIONS)
    ]
    parts = [f"parameters in {_told(params)}"]
    if products:
        parts.append(f"products in {_told(products)}")
    if replicas > 1 and trained:
        parts.append(f"gradients summed over ranks in {_told(sums.of_messages(dtype, replicas) for dtype in trained)}")
    return ", ".join(parts)


def _trains(variant: Variant, value: int) -> bool:
    return variant.whole.facts.values[value].requires_grad


def _told(dtypes: Iterable[torch.dtype]) -> str:
    """Types, the most frequent first."""
    counted = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return " and ".join(name for name, _ in counted.most_common()) or "none"
