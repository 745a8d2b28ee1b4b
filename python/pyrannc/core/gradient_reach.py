"""From where gradients come to the Values of a Graph."""

from __future__ import annotations

from collections.abc import Set

from pyrannc.core.graph import GraphFacts

Senders = dict[int, set[int]]
"""By Value, under its first name, the Ops whose backward gives it gradients."""

SCRIPT = -1
"""In the place of an Op: the gradient of an output comes from outside."""


def gradient_senders(facts: GraphFacts, outputs: Set[int]) -> Senders:
    """Where gradients come from in a backward of these outputs.

    Names of the same memory count as one Value, as an Op may change it in place under any of them.
    """
    senders: Senders = {facts.root(value): {SCRIPT} for value in outputs if facts.values[value].requires_grad}
    for number in reversed(range(len(facts.ops))):
        op = facts.ops[number]
        touched = [value for value in (*op.results, *op.mutates) if facts.values[value].requires_grad]
        if op.grad_enabled and any(facts.root(value) in senders for value in touched):
            for value in op.operands:
                if facts.values[value].requires_grad:
                    senders.setdefault(facts.root(value), set()).add(number)
    return senders
