"""Which Values of a Graph an output is computed from."""

from __future__ import annotations

from collections.abc import Set

from pyrannc.core.graph import GraphFacts


def reach(facts: GraphFacts, outputs: Set[int]) -> frozenset[int]:
    """The Values that some of the outputs may depend on, these included.

    Names of the same memory count as one Value: what an Op changes in place may be read under any of them.
    """
    needed = {facts.root(value) for value in outputs}
    for op in reversed(facts.ops):
        if any(facts.root(value) in needed for value in (*op.results, *op.mutates)):
            needed.update(map(facts.root, op.operands))
    return frozenset(value for value in range(len(facts.values)) if facts.root(value) in needed)
