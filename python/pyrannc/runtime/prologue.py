"""What a Stage computes once a step, whatever the part of the batch: a parametrized weight, a table of positions.

Microbatches use the results through leaves. What their backwards leave there is summed, and goes on to the parameters
in one backward after the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pyrannc.blocks.conversion import HALF
from pyrannc.blocks.function import StageCode
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import StagePart


class PrologueCode:
    """A Stage's Ops that run once a step.

    Args:
        code: the Ops.
        facts: the Graph.
        part: what belongs to them.
        names: first names of parameters, by the Values through which the Stage reads them.

    Attributes:
        params: first names of the parameters that they read.
        changed: buffers that they change, by Value.
    """

    def __init__(self, code: StageCode, facts: GraphFacts, part: StagePart, names: Mapping[int, str]) -> None:
        self.code = code
        used = {value for op in part.ops for value in facts.ops[op].operands}
        self.params = frozenset(name for value, name in names.items() if value in used)
        roots = {facts.root(value) for op in part.ops for value in facts.ops[op].mutates}
        self._in_place = frozenset(facts.buffers[buffer].value for buffer in part.buffers) & roots
        self.changed = self._in_place | code.updates.keys()

    def run(self, tensors: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], ...]:
        """Computes, and gives the buffers their new contents.

        Returns:
            The results, and the changed buffers as Ops of the microbatches read them; both by Value.
        """
        own = {value: buffers[value].clone() for value in self._in_place}
        results = self.code(0, {**tensors, **buffers, **own})
        seen = {value: buffers[value].clone() for value in self.code.updates} | own
        with torch.no_grad():
            for value, contents in own.items():
                buffers[value].copy_(contents)
            for value, update in self.code.updates.items():
                buffers[value].copy_(results[update])
        return results, seen


class Prologue:
    """The results of one step, and their gradients.

    Args:
        made: by Value.
        seen: buffers that have changed, as microbatches read them.
        trains: a backward will come.

    Attributes:
        tensors: what microbatches read, by Value.
    """

    def __init__(self, made: Mapping[int, Tensor], seen: Mapping[int, Tensor], *, trains: bool) -> None:
        with_grad = {value: tensor for value, tensor in made.items() if trains and tensor.requires_grad}
        self._roots: dict[int, GradientEdge] = {value: get_gradient_edge(tensor) for value, tensor in with_grad.items()}
        self._leaves = {value: tensor.detach().requires_grad_() for value, tensor in with_grad.items()}
        self._sums: dict[int, Tensor] = {}
        self.tensors = {**seen, **made, **self._leaves}

    def collect(self) -> None:
        """Takes what the backward of a microbatch has left, where a sum needs more digits than the gradients have."""
        for value, leaf in self._leaves.items():
            if leaf.grad is not None and leaf.dtype in HALF:
                known = self._sums.get(value)
                grad = leaf.grad.to_dense().float()
                self._sums[value] = grad if known is None else known.add_(grad)
                leaf.grad = None

    def backward(self, *, keep_graph: bool) -> None:
        """Sends the sums on to the parameters, after the last microbatch."""
        grads = {value: leaf.grad.to_dense() for value, leaf in self._leaves.items() if leaf.grad is not None}
        grads |= {value: total.to(self._leaves[value].dtype) for value, total in self._sums.items()}
        self._sums.clear()
        for leaf in self._leaves.values():
            leaf.grad = None
        if grads:
            roots = [self._roots[value] for value in grads]
            torch.autograd.backward(roots, list(grads.values()), retain_graph=keep_graph)
