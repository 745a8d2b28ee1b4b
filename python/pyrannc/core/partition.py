"""A Graph divided over Stages, or over Blocks, as the native core divided it.

The classes mirror the core's JSON (crates/plan: ``Partition``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RowDim:
    """Dimension ``dim`` holds the rows, ``per_row`` elements each."""

    dim: int
    per_row: int


@dataclass(frozen=True)
class InputPart:
    """An input of the Graph, as a Stage uses it."""

    index: int
    value: int
    has_rows: bool
    requires_grad: bool


@dataclass(frozen=True)
class Crossing:
    """A Value made by one Stage and used by later ones."""

    value: int
    source: int
    targets: tuple[int, ...]
    row_dim: RowDim
    requires_grad: bool


@dataclass(frozen=True)
class OutputPart:
    """An output of the Graph: made by Stage ``stage``, or handed through from input ``input``."""

    value: int
    stage: int | None
    input: int | None
    row_dim: RowDim | None


_WITHOUT = " without "


@dataclass(frozen=True)
class SpanPart:
    """Ops that run as one function; all numbers are the Graph's ids.

    Attributes:
        takes: the Values that are its arguments, parameters, buffers and constants too.
        gives: the Values that are its results.
        hash: functions with the same compute the same of their arguments.
    """

    ops: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    hash: str

    def hash_without(self, places: Sequence[int]) -> str:
        """That of the rest, where Ops at some places are left to others."""
        return f"{self.hash}{_WITHOUT}{places}"

    @property
    def hash_of_all(self) -> str:
        """The core's hash, of all of its Ops."""
        return self.hash.partition(_WITHOUT)[0]


@dataclass(frozen=True)
class StagePart:
    """What one Stage holds, takes in and gives out; all numbers are the Graph's ids.

    Attributes:
        prologue: its Ops that run once a step, before all others.
        spans: its other Ops in the order in which they run; none where the core was not asked for Spans.
    """

    ops: tuple[int, ...]
    inputs: tuple[InputPart, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    buffers: tuple[int, ...]
    constants: tuple[int, ...]
    mutated_buffers: tuple[int, ...]
    prologue: SpanPart | None = None
    spans: tuple[SpanPart, ...] = ()

    def apart(self) -> tuple[StagePart | None, StagePart]:
        """What runs once a step, whose outputs are what it gives, and what runs for each microbatch."""
        first = self.prologue
        if first is None:
            return None, self
        nothing: dict[str, tuple[()]] = dict.fromkeys(("inputs", "receives", "sends"), ())
        once = replace(self, ops=first.ops, outputs=first.gives, prologue=None, spans=(first,), **nothing)
        left = tuple(op for op in self.ops if op not in set(first.ops))
        return once, replace(self, ops=left, prologue=None)


@dataclass(frozen=True)
class Parts:
    """A Graph divided over Stages."""

    stages: tuple[StagePart, ...]
    crossings: dict[int, Crossing]
    outputs: tuple[OutputPart, ...]

    @staticmethod
    def from_json(text: str) -> Parts:
        """Reads the core's ``Partition``."""
        parts = json.loads(text)
        return Parts(
            stages=tuple(_stage_part(item) for item in parts["stages"]),
            crossings={item["value"]: _crossing(item) for item in parts["crossings"]},
            outputs=tuple(_output_part(item) for item in parts["outputs"]),
        )


def _row_dim(item: dict[str, int] | None) -> RowDim | None:
    return None if item is None else RowDim(item["dim"], item["per_row"])


def _crossing(item: dict[str, Any]) -> Crossing:
    row_dim = RowDim(item["row_dim"]["dim"], item["row_dim"]["per_row"])
    return Crossing(item["value"], item["from"], tuple(item["to"]), row_dim, item["requires_grad"])


def _output_part(item: dict[str, Any]) -> OutputPart:
    source = item["source"]
    return OutputPart(item["value"], source.get("stage"), source.get("input"), _row_dim(item["row_dim"]))


def _stage_part(item: dict[str, Any]) -> StagePart:
    parted = ("inputs", "prologue", "spans")
    lists = {name: tuple(item[name]) for name in StagePart.__dataclass_fields__ if name not in parted}
    inputs = tuple(
        InputPart(part["index"], part["value"], part["has_rows"], part["requires_grad"]) for part in item["inputs"]
    )
    prologue = None if item["prologue"] is None else _span(item["prologue"])
    return StagePart(inputs=inputs, prologue=prologue, spans=tuple(map(_span, item["spans"])), **lists)


def _span(item: dict[str, Any]) -> SpanPart:
    return SpanPart(tuple(item["ops"]), tuple(item["takes"]), tuple(item["gives"]), item["hash"])
