"""A backward in two parts: first the gradients of what came in, which other ranks wait for, then those of parameters.

The first part runs towards what came in. It keeps the gradients that come to nodes of autograd's graph which alone lead
to some parameters; the second part runs these nodes once more, towards their parameters only (Qi et al., "Zero Bubble
Pipeline Parallelism", 2023). A parameter to which several nodes lead gets its gradient in the first part, and so does
one behind code that may not run so: Python's, which may not run twice, and a kernel of torch's. Compiled Spans have
nodes for their second part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pyrannc.blocks.later import later_of, token

_Owner: TypeAlias = Node | str
_ROOTS, _SHARED, _LATER = "roots", "shared", "later"
"""In the place of the node that alone leads to something: the roots themselves, several nodes, and nodes that compute
later."""

_WHOLE = frozenset({"NativeGroupNormBackward0"})
"""Nodes that may not run towards their parameters alone: torch's host kernel for inputs whose channels lie last writes
to gradients of the input that nobody wants, which ends the process (seen with torch 2.11)."""


class SplitBackward:
    """The backward of one microbatch.

    Args:
        roots: where it starts.
        seeds: their gradients.
        inputs: leaves whose gradients others wait for.
    """

    def __init__(self, roots: Sequence[GradientEdge], seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._roots = roots
        self._seeds = seeds
        self._inputs = inputs
        nodes = list(_in_order([root.node for root in roots]))
        towards = _leading_to(nodes, {get_gradient_edge(leaf).node for leaf in inputs})
        self._leaves: dict[_Owner, list[Tensor]] = defaultdict(list)
        owners = _owners(nodes, towards, [root.node for root in roots])
        for node in nodes:
            if node in owners and hasattr(node, "variable"):
                self._leaves[owners[node]].append(node.variable)
        self._later = [
            (node, later) for node in nodes if owners.get(node) is _LATER and (later := later_of(node)) is not None
        ]
        self._own_roots = [place for place, root in enumerate(roots) if root.node not in towards]
        self._kept: list[tuple[Node, tuple[Tensor | None, ...]]] = []

    def run_inputs(self) -> None:
        """Leaves the gradients of the inputs on them, and those of parameters that cannot wait."""
        for _, later in self._later:
            later.compute = None
        targets = [*self._inputs, *self._leaves.pop(_SHARED, ())]
        hooks = [node.register_prehook(self._keeper(node)) for node in self._leaves if isinstance(node, Node)]
        try:
            if targets and self._roots:
                torch.autograd.backward(self._roots, self._seeds, inputs=targets, retain_graph=True)
        finally:
            for hook in hooks:
                hook.remove()

    def _keeper(self, node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        kept = self._kept

        def keep(grads: tuple[Tensor | None, ...]) -> None:
            kept.append((node, grads))

        return keep

    def run_weights(self, *, keep_graph: bool) -> None:
        """Leaves the gradients of parameters on them.

        Args:
            keep_graph: leave the autograd graph alive.
        """
        leaves = self._leaves.get(_ROOTS)
        if leaves:
            roots, seeds = [self._roots[p] for p in self._own_roots], [self._seeds[p] for p in self._own_roots]
            torch.autograd.backward(roots, seeds, inputs=leaves, retain_graph=keep_graph)
        able = [node for node, later in self._later if later.compute is not None]
        leaves = self._leaves.get(_LATER)
        if able and leaves:
            tokens = [token(leaves[0].device)] * len(able)
            torch.autograd.backward(
                [GradientEdge(node, 0) for node in able], tokens, inputs=leaves, retain_graph=keep_graph
            )
        for node, grads in self._kept:
            edges = [GradientEdge(node, place) for place, grad in enumerate(grads) if grad is not None]
            came = [grad for grad in grads if grad is not None]
            torch.autograd.backward(edges, came, inputs=self._leaves[node], retain_graph=keep_graph)
        self._kept.clear()


def _in_order(roots: Sequence[Node]) -> Iterator[Node]:
    """All nodes of a graph, each before those that come after it in a backward."""
    done: list[Node] = []
    seen: set[Node] = set()
    open_nodes: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while open_nodes:
        node, is_done = open_nodes.pop()
        if is_done:
            done.append(node)
        elif node not in seen:
            seen.add(node)
            open_nodes.append((node, True))
            open_nodes.extend((child, False) for child, _ in node.next_functions if child is not None)
    return reversed(done)


def _leading_to(nodes: Sequence[Node], ends: set[Node]) -> set[Node]:
    """The nodes from which a backward comes to some of ``ends``."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if node in ends or any(child in found for child, _ in node.next_functions):
            found.add(node)
    return found


def _owners(nodes: Sequence[Node], towards: set[Node], roots: Sequence[Node]) -> dict[Node, _Owner]:
    """Of the nodes that do not lead ``towards`` the inputs, which one that does leads to them."""
    owners: dict[Node, _Owner] = {root: _ROOTS for root in roots if root not in towards}
    for node in nodes:
        owner: _Owner = node
        if node not in towards:
            owner = owners[node]
        elif isinstance(node, BackwardCFunction) or node.name() in _WHOLE:
            owner = _SHARED
        for child, _ in node.next_functions:
            if child is not None and child not in towards:
                own = _LATER if node in towards and later_of(child) is not None else owner
                owners[child] = own if owners.get(child, own) is own else _SHARED
    return owners
