"""What one rank does for one batch, as the native core decided it.

The classes mirror the core's JSON (crates/plan: ``RankView`` and ``Partition``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Rows: TypeAlias = tuple[int, int]
"""Rows ``lo..hi`` of a microbatch or of a local batch."""

Mode: TypeAlias = Literal["train_1f1b", "train_fill_drain", "forward"]


@dataclass(frozen=True)
class RowDim:
    """Dimension ``dim`` holds the rows, ``per_row`` elements each."""

    dim: int
    per_row: int


@dataclass(frozen=True)
class Piece:
    """Rows of one Value within a microbatch."""

    value: int
    rows: Rows


@dataclass(frozen=True)
class Forward:
    """Forward of this rank's rows of a microbatch."""

    microbatch: int


@dataclass(frozen=True)
class Backward:
    """Backward of this rank's rows of a microbatch."""

    microbatch: int


@dataclass(frozen=True)
class Message:
    """Values (to a later Stage) or their gradients (to an earlier one) between two ranks."""

    microbatch: int
    peer: int
    kind: Literal["value", "grad"]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Send(Message):
    """Starts to send."""


@dataclass(frozen=True)
class Recv(Message):
    """Starts to receive; the computation of the message's microbatch waits for it."""


@dataclass(frozen=True)
class Reduce:
    """Sums gradients over all ranks that hold the same Params."""


Action: TypeAlias = Forward | Backward | Send | Recv | Reduce


@dataclass(frozen=True)
class Transfer:
    """Rows that go from one rank to another, or stay (``src == dst``)."""

    src: int
    dst: int
    microbatch: int
    value: int
    rows: Rows


@dataclass(frozen=True)
class Slice:
    """Rows ``local`` of this rank's batch stand at row ``at`` of a microbatch."""

    microbatch: int
    local: Rows
    at: int


@dataclass(frozen=True)
class RankProgram:
    """One rank's Actions and row ranges for one batch; ``global_rows`` are ``rows`` as they stand in all of it."""

    rank: int
    stage: int
    mode: Mode
    gather_inputs: bool
    total_rows: int
    microbatches: tuple[int, ...]
    rows: tuple[Rows, ...]
    global_rows: tuple[tuple[Rows, ...], ...]
    slices: tuple[Slice, ...]
    inputs: tuple[Transfer, ...]
    outputs: tuple[Transfer, ...]
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]

    @staticmethod
    def from_json(text: str) -> RankProgram:
        """Reads the core's ``RankView``."""
        view = json.loads(text)
        return RankProgram(
            rank=view["rank"],
            stage=view["stage"],
            mode=view["mode"],
            gather_inputs=view["gather_inputs"],
            total_rows=view["total_rows"],
            microbatches=tuple(view["microbatches"]),
            rows=tuple(_rows(pair) for pair in view["rows"]),
            global_rows=tuple(tuple(_rows(pair) for pair in runs) for runs in view["global_rows"]),
            slices=tuple(Slice(item["mb"], _rows(item["local"]), item["at"]) for item in view["slices"]),
            inputs=tuple(_transfer(item) for item in view["inputs"]),
            outputs=tuple(_transfer(item) for item in view["outputs"]),
            forward=tuple(_action(item) for item in view["forward"]),
            backward=tuple(_action(item) for item in view["backward"]),
        )


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


@dataclass(frozen=True)
class StagePart:
    """What one Stage holds, takes in and gives out; all numbers are the Graph's ids."""

    ops: tuple[int, ...]
    inputs: tuple[InputPart, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    buffers: tuple[int, ...]
    constants: tuple[int, ...]
    mutated_buffers: tuple[int, ...]


@dataclass(frozen=True)
class Parts:
    """A Graph divided over Stages."""

    stages: tuple[StagePart, ...]
    crossings: dict[int, Crossing]
    outputs: tuple[OutputPart, ...]
    tied: dict[int, tuple[int, ...]]

    @staticmethod
    def from_json(text: str) -> Parts:
        """Reads the core's ``Partition``."""
        parts = json.loads(text)
        return Parts(
            stages=tuple(_stage_part(item) for item in parts["stages"]),
            crossings={item["value"]: _crossing(item) for item in parts["crossings"]},
            outputs=tuple(_output_part(item) for item in parts["outputs"]),
            tied={item["param"]: tuple(item["stages"]) for item in parts["tied"]},
        )


def _rows(pair: list[int]) -> Rows:
    return pair[0], pair[1]


def _transfer(item: dict[str, Any]) -> Transfer:
    return Transfer(item["src"], item["dst"], item["mb"], item["value"], _rows(item["rows"]))


def _action(item: dict[str, Any]) -> Action:
    kind = item["action"]
    if kind == "forward":
        return Forward(item["mb"])
    if kind == "backward":
        return Backward(item["mb"])
    if kind == "reduce":
        return Reduce()
    pieces = tuple(Piece(piece["value"], _rows(piece["rows"])) for piece in item["pieces"])
    return (Send if kind == "send" else Recv)(item["mb"], item["peer"], item["kind"], pieces)


def _row_dim(item: dict[str, int] | None) -> RowDim | None:
    return None if item is None else RowDim(item["dim"], item["per_row"])


def _crossing(item: dict[str, Any]) -> Crossing:
    row_dim = RowDim(item["row_dim"]["dim"], item["row_dim"]["per_row"])
    return Crossing(item["value"], item["from"], tuple(item["to"]), row_dim, item["requires_grad"])


def _output_part(item: dict[str, Any]) -> OutputPart:
    source = item["source"]
    return OutputPart(item["value"], source.get("stage"), source.get("input"), _row_dim(item["row_dim"]))


def _stage_part(item: dict[str, Any]) -> StagePart:
    lists = {name: tuple(item[name]) for name in StagePart.__dataclass_fields__ if name != "inputs"}
    inputs = tuple(
        InputPart(part["index"], part["value"], part["has_rows"], part["requires_grad"]) for part in item["inputs"]
    )
    return StagePart(inputs=inputs, **lists)
