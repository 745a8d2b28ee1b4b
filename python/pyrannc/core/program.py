"""What one rank does for one batch, as the native core decided it.

The classes mirror the core's JSON (crates/plan: ``RankView``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

Rows: TypeAlias = tuple[int, int]
"""Rows ``lo..hi`` of a microbatch or of a local batch."""

Kind: TypeAlias = Literal["input", "output", "output_grad", "input_grad"]
"""What moves between ranks' own batches and the Stages."""

Call: TypeAlias = Literal["forward", "whole", "halves"]
"""How a call of the model comes: ``whole`` has the loss inside, and forwards and backwards in one list; ``halves`` has
the criterion outside, and a second list for the backwards."""


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
class BackwardInput:
    """The first part of the backward of this rank's rows of a microbatch: the gradients of what came in."""

    microbatch: int


@dataclass(frozen=True)
class BackwardWeight:
    """The second part of a backward: the gradients of parameters."""

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
class Parcel:
    """Rows to or from one other rank, packed in this order."""

    peer: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Exchange:
    """Starts to give and take, at once, all rows of a kind for a microbatch. The computation that needs them waits for
    it, or where none does, the end of the list."""

    microbatch: int
    kind: Kind
    sends: tuple[Parcel, ...]
    recvs: tuple[Parcel, ...]


@dataclass(frozen=True)
class AllReduce:
    """Sums a bucket of gradients over a group of ranks: at once, or under the backward that follows, as soon as that
    has filled the bucket. The rank waits for it at the end of its list."""

    group: int
    bucket: int
    bytes: int


@dataclass(frozen=True)
class ReduceScatter:
    """Sums a microbatch's gradients of a bucket over a group of ranks, each rank its part: under the backward that
    follows, as soon as that has filled the bucket, or at once where the rank has no rows of the microbatch. The rank
    waits for it before its next backward, and at the end of its list."""

    group: int
    bucket: int
    microbatch: int
    bytes: int


@dataclass(frozen=True)
class AllGather:
    """Gives every rank of a group the parameters of a bucket, of which each has a part, for the forward or backward of
    a microbatch that follows; where the rank has no rows of it, for the others."""

    group: int
    bucket: int
    microbatch: int
    direction: Literal["forward", "backward"]
    bytes: int


Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight
Action: TypeAlias = Compute | Send | Recv | Exchange | AllReduce | ReduceScatter | AllGather


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
    """One rank's Actions and row ranges for one batch.

    Attributes:
        stage: the one that the rank has; the core knows ranks with several, but runs none.
        global_rows: ``rows`` as they stand in all of the batch.
        exchanges: whether any rank exchanges rows.
        value_window, grad_window: messages that may be under way on a channel before the sender waits.
    """

    rank: int
    stage: int
    call: Call
    gather_inputs: bool
    total_rows: int
    microbatches: tuple[int, ...]
    rows: tuple[Rows, ...]
    global_rows: tuple[tuple[Rows, ...], ...]
    slices: tuple[Slice, ...]
    inputs: tuple[Transfer, ...]
    outputs: tuple[Transfer, ...]
    exchanges: bool
    value_window: int | None
    grad_window: int | None
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]

    @cached_property
    def value_messages(self) -> Mapping[int, int]:
        """How many messages take Values of a microbatch to later Stages, by microbatch."""
        return Counter(a.microbatch for a in self.forward if isinstance(a, Send) and a.kind == "value")

    @cached_property
    def splits_backward(self) -> bool:
        """True when some backwards come in two parts."""
        return any(isinstance(action, BackwardInput) for action in (*self.forward, *self.backward))

    @staticmethod
    def from_json(text: str) -> RankProgram:
        """Reads the core's ``RankView``."""
        view = json.loads(text)
        (seat,) = view["seats"]
        return RankProgram(
            rank=view["rank"],
            stage=seat["stage"],
            call=view["call"],
            gather_inputs=view["gather_inputs"],
            total_rows=view["total_rows"],
            microbatches=tuple(view["microbatches"]),
            rows=tuple(_rows(pair) for pair in seat["rows"]),
            global_rows=tuple(tuple(_rows(pair) for pair in runs) for runs in seat["global_rows"]),
            slices=tuple(Slice(item["mb"], _rows(item["local"]), item["at"]) for item in view["slices"]),
            inputs=tuple(_transfer(item) for item in view["inputs"]),
            outputs=tuple(_transfer(item) for item in view["outputs"]),
            exchanges=view["exchanges"],
            value_window=view["value_window"],
            grad_window=view["grad_window"],
            forward=tuple(_action(item) for item in view["forward"]),
            backward=tuple(_action(item) for item in view["backward"]),
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
    if kind == "backward_input":
        return BackwardInput(item["mb"])
    if kind == "backward_weight":
        return BackwardWeight(item["mb"])
    if kind == "all_reduce":
        return AllReduce(item["group"], item["bucket"], item["bytes"])
    if kind == "reduce_scatter":
        return ReduceScatter(item["group"], item["bucket"], item["mb"], item["bytes"])
    if kind == "all_gather":
        return AllGather(item["group"], item["bucket"], item["mb"], item["pass"], item["bytes"])
    if kind == "exchange":
        return Exchange(item["mb"], item["kind"], _parcels(item["sends"]), _parcels(item["recvs"]))
    return (Send if kind == "send" else Recv)(item["mb"], item["peer"], item["kind"], _pieces(item["pieces"]))


def _parcels(items: list[dict[str, Any]]) -> tuple[Parcel, ...]:
    return tuple(Parcel(item["peer"], _pieces(item["pieces"])) for item in items)


def _pieces(items: list[dict[str, Any]]) -> tuple[Piece, ...]:
    return tuple(Piece(item["value"], _rows(item["rows"])) for item in items)
