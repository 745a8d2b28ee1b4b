"""The captured forms of one model: in training and evaluation mode, with inputs of other shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from pyrannc._native import Graph, Partition, Plan, Program
from pyrannc.call.alike import capture_alike, first_difference
from pyrannc.call.data_guards import DataGuards
from pyrannc.call.guards import ModuleGuards
from pyrannc.capture import Captured, capture
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts
from pyrannc.core.program import Call, RankProgram
from pyrannc.errors import CaptureError
from pyrannc.job import agree, process

CallKey = tuple[tuple[Hashable, ...], Hashable]
"""The signature of a call, and which parameters require gradients."""
MOST_VARIANTS = 16
_NO_NUMBER = -1


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
        self.number = _NO_NUMBER
        self.calls = 0
        self.guards = ModuleGuards(model, self.captured.python_state)
        changes_buffers = any(op.mutates for op in self.facts.ops)
        self.questions = DataGuards(self.captured.assumptions, device, waits=changes_buffers)
        self._programs: dict[Hashable, RankProgram] = {}
        self._check_outputs()

    @property
    def can_compare(self) -> bool:
        """True when another capture must give the same: no answer came from parameters, which may be elsewhere now."""
        return process.get_world_size() == 1 or not self.questions.unchecked

    def compare_with(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, rows: int
    ) -> None:
        """Captures the call once more, on this rank alone.

        Raises:
            CaptureError: the model now computes something else, and no guard has seen why.
        """
        graph = Graph.from_json(capture(model, args, kwargs, device=device, rows=rows).graph_json)
        if graph.hash() != self.graph.hash():
            here, now = first_difference(self.graph.op_texts(), graph.op_texts(), "the same Ops on other tensors")
            raise CaptureError(
                f"the model computes something else than when it was captured: it had\n  {here}\nand now has\n  {now}\n"
                "What decides that must be an argument, an attribute of a sub-module or its training flag; a global "
                "variable, a closure or a file is not seen to change"
            )

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
    """The captured forms of one model, numbered alike on all ranks; of too many, the oldest in use goes."""

    def __init__(self) -> None:
        self._kept: dict[CallKey, list[Variant]] = {}
        self._by_use: dict[Variant, CallKey] = {}
        self._first: Variant | None = None
        self.made = 0

    @property
    def first(self) -> Variant:
        """The one that the Plan was made for."""
        assert self._first is not None, "there is a captured form"
        return self._first

    def find(self, key: CallKey) -> Variant | None:
        """The captured form of calls with this key whose guards hold, if there is one."""
        return next((variant for variant in self._kept.get(key, ()) if variant.guards.hold()), None)

    def add(self, key: CallKey, variant: Variant) -> Variant | None:
        """Keeps a captured form under the next number, and returns one that had to go for it."""
        self._first = self._first or variant
        variant.number = self.made
        self.made += 1
        self._kept.setdefault(key, []).insert(0, variant)
        self._by_use[variant] = key
        if len(self._by_use) <= MOST_VARIANTS:
            return None
        oldest = next(known for known in self._by_use if known is not self._first)
        self._kept[self._by_use.pop(oldest)].remove(oldest)
        return oldest

    def use(self, variant: Variant) -> None:
        """Counts a call, which all ranks make."""
        variant.calls += 1
        self._by_use[variant] = self._by_use.pop(variant)

    def why_new(self, key: CallKey) -> str:
        """What makes the captured form with this key differ from the one used last."""
        last = next(reversed(self._by_use))
        before = self._by_use[last]
        if before == key:
            return last.guards.changed() or "a sub-module"
        names = ("Python values or structure of the arguments", "shapes or types of tensors", "mode", "autocast")
        parts = [name for name, old, new in zip(names, before[0], key[0], strict=True) if old != new]
        return ", ".join(parts + ["requires_grad"] * (before[1] != key[1]))

    def clear(self) -> None:
        """Forgets all."""
        self._kept.clear()
        self._by_use.clear()
        self._first = None
        self.made = 0


def _extents(shape: Sequence[tuple[int, int]]) -> str:
    terms = ["*".join(filter(None, [str(k) if k != 1 else "", "b"])) if k else str(c) for k, c in shape]
    return "(" + ", ".join(terms) + ")"
