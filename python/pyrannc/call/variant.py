"""The captured forms of one model: in training and evaluation mode, with inputs of other shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from pyrannc._native import Graph, Partition, Plan, Program
from pyrannc.capture import Captured, capture
from pyrannc.core.graph import GraphFacts
from pyrannc.core.program import Mode, Parts, RankProgram
from pyrannc.errors import CaptureError, MismatchError
from pyrannc.job import agree, process


class Variant:
    """A captured call with its Graph, equal on all ranks.

    Args:
        model: the user's model.
        args: sample positional arguments.
        kwargs: sample keyword arguments.
        device: where the model will run.
        rows: batch size of the sample.

    Raises:
        CaptureError: the call cannot be captured.
        MismatchError: another rank captured something else.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, rows: int
    ) -> None:
        self.captured: Captured
        self.graph: Graph
        self.captured, self.graph = self._capture_alike(model, args, kwargs, device, rows)
        self.facts = GraphFacts.from_json(self.captured.graph_json, self.graph.row_dims())
        self.loss = self._find_loss()
        self.active: set[str] | None = None
        self._programs: dict[Hashable, RankProgram] = {}
        self._check_outputs()

    def _capture_alike(self, model: nn.Module, *call: Any) -> tuple[Captured, Graph]:
        args, kwargs, device, rows = call

        def attempt() -> tuple[Captured, Graph]:
            captured = capture(model, args, kwargs, device=device, rows=rows)
            return captured, Graph.from_json(captured.graph_json)

        captured, graph = agree.together(attempt)
        hashes: list[str] = agree.gather_objects(graph.hash())
        if len(set(hashes)) > 1:
            raise MismatchError(_first_difference(graph, hashes))
        return captured, graph

    def _find_loss(self) -> int | None:
        """The scalar loss, if the model returns exactly one scalar that can be differentiated."""
        values = self.facts.values
        scalars = {value for value in self.facts.outputs if not values[value].shape and values[value].requires_grad}
        return scalars.pop() if len(scalars) == 1 else None

    @property
    def trains(self) -> bool:
        """True when some output leads back to parameters or inputs."""
        return any(self.facts.values[value].requires_grad for value in self.facts.outputs)

    @cached_property
    def draws(self) -> bool:
        """True when some Op draws random numbers."""
        return any(op.random for op in self.facts.ops)

    def _check_outputs(self) -> None:
        for value in set(self.facts.outputs) - set(self.facts.inputs):
            facts = self.facts.values[value]
            if not any(per_row for per_row, _ in facts.shape) and not facts.dtype.is_floating_point:
                raise CaptureError(
                    f'output "{facts.name}" has type {facts.dtype} and no batch dimension, so it can neither '
                    "be divided by rows nor averaged; return it as a floating-point tensor"
                )

    def divide(self, partition: Partition) -> None:
        """Says how the Graph is divided over Stages."""
        self.partition = partition
        self.parts = Parts.from_json(partition.to_json())
        for part in self.parts.outputs:
            facts = self.facts.values[part.value]
            if part.input is None and part.row_dim is None and any(per_row for per_row, _ in facts.shape):
                raise CaptureError(
                    f'the rows of output "{facts.name}" cannot be told: its extents are {_extents(facts.shape)} for a '
                    "batch of b; return it with the batch as a dimension of its own"
                )

    def program(self, plan: Plan, rows: tuple[int, ...], gather_inputs: bool, mode: Mode) -> RankProgram:
        """What this rank does for a batch; made and checked once for each set of row counts."""
        key = (rows, mode)
        if key not in self._programs:
            program = Program.build(plan, self.partition, list(rows), gather_inputs, mode)
            self._programs[key] = RankProgram.from_json(program.rank_view(process.get_rank()))
        return self._programs[key]


def _extents(shape: Sequence[tuple[int, int]]) -> str:
    terms = ["*".join(filter(None, [str(k) if k != 1 else "", "b"])) if k else str(c) for k, c in shape]
    return "(" + ", ".join(terms) + ")"


def _first_difference(graph: Graph, hashes: Sequence[str]) -> str:
    """Names the ranks whose Graph differs from rank 0's, and the first Op that does."""
    texts: list[list[str]] = agree.gather_objects(graph.op_texts())
    other = next(rank for rank, found in enumerate(hashes) if found != hashes[0])
    mine, theirs = texts[0], texts[other]
    for index in range(max(len(mine), len(theirs))):
        here = mine[index] if index < len(mine) else "nothing"
        there = theirs[index] if index < len(theirs) else "nothing"
        if here != there:
            return f"the ranks have different models: rank 0 has\n  {here}\nwhere rank {other} has\n  {there}"
    return f"the ranks have different models: rank {other}'s parameters, buffers or inputs are not those of rank 0"
