"""Ops that do nothing but convert a parameter to half the digits: a Stage that only converts it does so once a call."""

from __future__ import annotations

import torch

from pyrannc.capture import Captured
from pyrannc.core.graph import GraphFacts

HALF = (torch.float16, torch.bfloat16)
"""Types with half the digits."""


def conversions(captured: Captured, facts: GraphFacts) -> dict[int, int]:
    """Those that are all that the model does with a parameter: by Op, the parameter's Value."""
    readers: dict[int, list[int]] = {param.value: [] for param in facts.params}
    for number, op in enumerate(facts.ops):
        for value in readers.keys() & set(op.operands):
            readers[value].append(number)
    given = {*facts.outputs, *facts.mutated_roots, *(buffer.update for buffer in facts.buffers)}
    return {
        ops[0]: value
        for value, ops in readers.items()
        if len(ops) == 1
        and is_conversion(captured, facts, ops[0], value)
        and not given & {value, *facts.ops[ops[0]].results}
    }


def is_conversion(captured: Captured, facts: GraphFacts, op: int, value: int) -> bool:
    """True for a conversion of a parameter's Value through which gradients come, if the parameter gets any."""
    node, found = captured.op_nodes[op], facts.ops[op]
    if node.target is not torch.ops.aten.to.dtype or len(node.args) != 2 or node.kwargs or found.in_region:
        return False
    before, after = facts.values[value], facts.values[found.results[0]]
    gives_gradients = found.grad_enabled or not before.requires_grad
    return before.dtype == torch.float32 and after.dtype in HALF and gives_gradients
