"""Batch normalisation in training needs more than one value for each channel, wherever its rows are computed."""

from __future__ import annotations

import math

import torch
from torch import fx

from pyrannc.capture import Captured, Place
from pyrannc.capture.nodes.operands import arguments
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import StagePart
from pyrannc.core.program import RankProgram
from pyrannc.errors import InputError


def refuse_single_rows(captured: Captured, facts: GraphFacts, part: StagePart, program: RankProgram) -> None:
    """Finds out that this rank's rows of every microbatch are enough, as torch does before it normalises.

    Raises:
        InputError: there is one value for each channel of a microbatch.
    """
    for op in part.ops:
        node = captured.op_nodes[op]
        if not _normalises_by_batch(node):
            continue
        shape = facts.values[facts.ops[op].operands[0]]
        for lo, hi in program.rows:
            extents = shape.shape_at(hi - lo)
            if hi > lo and math.prod(extents) == extents[1]:
                raise InputError(
                    f"{captured.place(op)} normalises over the rows in hand, as BatchNorm does in training, but a "
                    f"microbatch has {hi - lo} row for this rank (rank {program.rank}) and so one value for each "
                    "channel; use a larger batch, or fewer microbatches or Replicas"
                )


def first_normalising(captured: Captured) -> Place | None:
    """Where the model first normalises over the rows in hand."""
    found = (op for op, node in enumerate(captured.op_nodes) if _normalises_by_batch(node))
    op = next(found, None)
    return None if op is None else captured.place(op)


def _normalises_by_batch(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.batch_norm.default and bool(arguments(node)["training"])
