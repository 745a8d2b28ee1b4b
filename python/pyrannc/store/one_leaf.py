"""A backward that leads to calls of one model, and to nothing else, reaches one leaf in place of each parameter.

torch visits every leaf behind a backward, which takes 14 us each beside a GPU. A call gives all its parameters their
gradients at once (:mod:`.delivery`), so where nobody else would be reached, ``inputs=`` names one leaf that is behind
every call. Everything else, such as layers before the model, ``autograd.grad`` or hooks on parameters, is left to
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pyrannc.capture.torch_internals.gradients import kept_uncompiled
from pyrannc.capture.torch_internals.patching import PatchPoint

OneLeaf = Callable[[], Tensor | None]
"""Tells the leaf, or ``None`` while each parameter has to be reached."""

_MOST_NODES = 16
"""Between a loss and the call: criteria, their weights, casts."""
_BACKWARD = PatchPoint(torch.autograd, "backward")


def lead_to_one_leaf(ctx: Any, leaf: OneLeaf) -> None:
    """Says that a backward of this node of a call has to reach nothing but this leaf."""
    ctx.one_leaf_of_call = leaf


def _one_leaf(loss: Tensor) -> Tensor | None:
    """What a backward of ``loss`` has to reach, if that is one leaf."""
    found: OneLeaf | None = None
    nodes = [loss.grad_fn]
    for node in nodes:
        leaf: OneLeaf | None = getattr(node, "one_leaf_of_call", None)
        if leaf is not None and found in (None, leaf):
            found = leaf
            continue
        behind = [] if node is None else [before for before, _ in node.next_functions if before is not None]
        # What has nothing behind is a leaf of the script's, and a function of the script may ask what is reached.
        if not behind or isinstance(node, FunctionCtx) or len(nodes) > _MOST_NODES:
            return None
        nodes += [before for before in behind if before not in nodes]
    return None if found is None else found()


@cache
def watch_backwards() -> None:
    """From now on, such backwards reach one leaf."""
    original = _BACKWARD.original

    @kept_uncompiled
    @wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        leaf = _one_leaf(tensors) if inputs is None and not create_graph and type(tensors) is Tensor else None
        if leaf is None:
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        # Nothing else runs meanwhile: a thread for the GPU would have to be woken first.
        with torch.autograd.set_multithreading_enabled(False):
            original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, leaf)

    setattr(_BACKWARD.owner, _BACKWARD.name, backward)
