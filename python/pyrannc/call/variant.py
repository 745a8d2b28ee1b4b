"""The captured forms of one model: in training and evaluation mode, with inputs of other shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from pyrannc._native import Graph, Partition, Plan, Program
from pyrannc.call.alike import capture_alike
from pyrannc.capture import Captured
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts
from pyrannc.core.program import Call, RankProgram
from pyrannc.errors import CaptureError
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
        self.captured, self.graph = capture_alike(model, args, kwargs, device, rows)
        self.facts = GraphFacts.from_json(self.captured.graph_json)
        self.loss = self._find_loss()
        self.active: set[str] | None = None
        self._programs: dict[Hashable, RankProgram] = {}
        self._check_outputs()

    def _find_loss(self) -> int | None:
        """The scalar loss, if the model returns exactly one scalar that can be differentiated."""
        values = self.facts.values
        scalars = {value for value in self.facts.outputs if not values[value].shape and values[value].requires_grad}
        return scalars.pop() if len(scalars) == 1 else None

    @property
    def trains(self) -> bool:
        """True when some output leads back to parameters or inputs."""
        return any(self.facts.values[value].requires_grad for value in self.facts.outputs)

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

    def follow(self, first: Variant) -> None:
        """Divides the Graph like that of another captured call, so that every parameter stays. All ranks call it."""
        self.divide(agree.together(lambda: first.partition.follow(first.graph, self.graph)))

    def program(self, plan: Plan, rows: tuple[int, ...], gather_inputs: bool, call: Call) -> RankProgram:
        """What this rank does for a batch; made and checked once for each set of row counts."""
        key = (rows, call)
        if key not in self._programs:
            program = Program.build(plan, self.partition, list(rows), gather_inputs, call)
            self._programs[key] = RankProgram.from_json(program.rank_view(process.get_rank()))
        return self._programs[key]


class Variants:
    """All captured forms of one model, numbered alike on all ranks."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Variant] = {}
        self._numbered: list[Variant] = []

    def get(self, key: Hashable) -> Variant | None:
        """The captured form of calls with this key, if there is one."""
        return self._by_key.get(key)

    @property
    def first(self) -> Variant:
        """The one that the Plan was made for."""
        return self._numbered[0]

    def number_of(self, key: Hashable) -> int | None:
        """The number of the captured form of calls with this key, if there is one."""
        known = self._by_key.get(key)
        return None if known is None else self._numbered.index(known)

    def add(self, key: Hashable, variant: Variant) -> None:
        """Keeps a captured form under the next number."""
        self._numbered.append(variant)
        self._by_key[key] = variant

    def clear(self) -> None:
        """Forgets all."""
        self._by_key.clear()
        self._numbered.clear()


def _extents(shape: Sequence[tuple[int, int]]) -> str:
    terms = ["*".join(filter(None, [str(k) if k != 1 else "", "b"])) if k else str(c) for k, c in shape]
    return "(" + ", ".join(terms) + ")"
