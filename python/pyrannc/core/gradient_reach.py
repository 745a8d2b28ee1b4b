"""Through which Values of a Graph gradients flow."""

from __future__ import annotations

from collections.abc import Set

from pyrannc.core.graph import GraphFacts


def gradient_reach(facts: GraphFacts, outputs: Set[int]) -> frozenset[int]:
    """The Values that gradients of the outputs may come back for.

    Names of the same memory count as one Value, as an Op may change it in place under any of them.
    """
    needed = {facts.root(value) for value in outputs}
    for op in reversed(facts.ops):
        touched = [value for value in (*op.results, *op.mutates) if facts.values[value].requires_grad]
        if op.grad_enabled and any(facts.root(value) in needed for value in touched):
            needed.update(facts.root(value) for value in op.operands if facts.values[value].requires_grad)
    return frozenset(
        value for value, found in enumerate(facts.values) if found.requires_grad and facts.root(value) in needed
    )
