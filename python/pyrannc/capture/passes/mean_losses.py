"""Losses averaged over targets that are not ignored, as a sum over targets by their count.

The mean over microbatches of such means is not the mean over all targets; sums and counts add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.facts import FACTS, GRAD_ENABLED, OF_PLACE, TensorFacts

_ATEN = torch.ops.aten
_LOSSES = (
    _ATEN.cross_entropy_loss.default,
    _ATEN.nll_loss.default,
    _ATEN.nll_loss_nd.default,
    _ATEN.nll_loss2d.default,
)
_NAMES = ("self", "target", "weight", "reduction", "ignore_index")
_DEFAULTS: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100}
_MEAN, _SUM = 1, 2


def divide_mean_losses(graph: fx.Graph) -> None:
    """Rewrites ``graph``. A loss whose targets are probabilities is a mean over rows and stays."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _LOSSES:
            given = _arguments(node)
            if given["reduction"] == _MEAN and not given["target"].meta["val"].is_floating_point():
                _Rewrite(graph, node, given).run()


def _arguments(node: fx.Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


class _Rewrite:
    def __init__(self, graph: fx.Graph, loss: fx.Node, given: dict[str, Any]) -> None:
        self._graph = graph
        self._loss = loss
        self._given = given

    def run(self) -> None:
        """Puts sum / count where the mean was."""
        loss, scores = self._loss, self._given["self"]
        users = list(loss.users)
        half = scores.meta["val"].dtype in (torch.float16, torch.bfloat16)
        extra = loss.args[5:] if len(loss.args) > 5 else ()
        kwargs = {name: value for name, value in loss.kwargs.items() if name not in _NAMES}
        with self._graph.inserting_before(loss):
            if half:
                # A sum over many targets is beyond what one of the types holds, and the other has few digits for it.
                scores = self._add(_ATEN.to.dtype, scores, torch.float32)
            weight = self._given["weight"]
            if half and weight is not None:
                weight = self._add(_ATEN.to.dtype, weight, torch.float32)
            loss.args = (scores, self._given["target"], weight, _SUM, self._given["ignore_index"], *extra)
            loss.kwargs = kwargs
            count = self._count(weight)
        dtype = loss.meta["val"].dtype
        if half:
            loss.meta["val"] = loss.meta["val"].float()
        with self._graph.inserting_after(loss):
            mean = self._add(_ATEN.div.Tensor, loss, count)
        if half:
            with self._graph.inserting_after(mean):
                mean = self._add(_ATEN.to.dtype, mean, dtype)
        for user in users:
            user.replace_input_with(loss, mean)

    def _count(self, weight: fx.Node | None) -> fx.Node:
        """The number of targets that are not ignored, or the sum of their weights."""
        target = self._given["target"]
        counted = self._add(_ATEN.ne.Scalar, target, self._given["ignore_index"])
        if weight is None:
            return self._add(_ATEN.sum.default, counted)
        if _requires_grad(weight):
            weight = self._add(_ATEN.detach.default, weight)
        classes = self._add(_ATEN.where.ScalarOther, counted, target, 0)
        if classes.meta["val"].dtype != torch.int64:
            classes = self._add(_ATEN.to.dtype, classes, torch.int64)
        weights = self._add(_ATEN.index.Tensor, weight, [classes])
        return self._add(_ATEN.sum.default, self._add(_ATEN.mul.Tensor, weights, counted))

    def _add(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        """A new Op at the loss's place in the model's source."""
        node = self._graph.call_function(target, args)
        with torch.no_grad():
            node.meta["val"] = target(*fx.node.map_arg(args, lambda operand: operand.meta["val"]))
        grad = any(_requires_grad(operand) for operand in node.all_input_nodes) and self._loss.meta.get(GRAD_ENABLED)
        made: Tensor = node.meta["val"]
        detached = target is _ATEN.detach.default or not made.is_floating_point()
        node.meta[FACTS] = {None: TensorFacts(bool(grad) and not detached, None)}
        for key in OF_PLACE:
            if key in self._loss.meta:
                node.meta[key] = self._loss.meta[key]
        return node


def _requires_grad(node: fx.Node) -> bool:
    facts = node.meta.get(FACTS, {}).get(None)
    tensor = node.meta.get("val")
    return bool(facts.requires_grad if facts is not None else isinstance(tensor, Tensor) and tensor.requires_grad)
