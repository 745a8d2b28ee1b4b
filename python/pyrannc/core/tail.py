"""A Graph divided into body and tail, as the native core divided it.

The classes mirror the core's JSON (crates/ir: ``Divided``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pyrannc.core.partition import RowDim

Join: TypeAlias = Literal["sum", "mean"] | RowDim
"""How results of parts of the batch make that of the whole."""


@dataclass(frozen=True)
class Joined:
    """A Value that parts of the batch make and the tail takes as a whole.

    Attributes:
        requires_grad: a gradient goes back into it.
        known: it depends on inputs and what stays alone, so that it can be known before the step.
    """

    value: int
    join: Join
    requires_grad: bool
    known: bool


@dataclass(frozen=True)
class TailPart:
    """What runs once a step on all rows; all numbers are ids of the whole Graph.

    Attributes:
        known_ops: what makes the joined Values that are known before the step.
        linear: the gradients that go back into joined Values depend on known ones alone.
        mixing: the Ops that mix rows themselves, and how.
    """

    ops: tuple[int, ...]
    joined: tuple[Joined, ...]
    known_ops: tuple[int, ...]
    outputs: tuple[int, ...]
    params: tuple[int, ...]
    buffers: tuple[int, ...]
    constants: tuple[int, ...]
    linear: bool
    mixing: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class DividedFacts:
    """A Graph divided into body and tail.

    Attributes:
        ops: by Op of the body, that of the whole Graph.
        values: by Value of the body, that of the whole Graph.
        joins: by output of the body, how parts join; ``None`` for rows and for what is the same for any rows.
    """

    ops: tuple[int, ...]
    values: tuple[int, ...]
    joins: tuple[Join | None, ...]
    tail: TailPart

    @staticmethod
    def from_json(text: str) -> DividedFacts:
        """Reads the core's ``Divided``."""
        divided = json.loads(text)
        joins = tuple(None if item is None else _join(item) for item in divided["joins"])
        return DividedFacts(tuple(divided["ops"]), tuple(divided["values"]), joins, _tail(divided["tail"]))


def _tail(item: dict[str, Any]) -> TailPart:
    return TailPart(
        ops=tuple(item["ops"]),
        joined=tuple(_joined(joined) for joined in item["joined"]),
        known_ops=tuple(item["known_ops"]),
        outputs=tuple(item["outputs"]),
        params=tuple(item["params"]),
        buffers=tuple(item["buffers"]),
        constants=tuple(item["constants"]),
        linear=item["linear"],
        mixing=tuple((op, how) for op, how in item["mixing"]),
    )


def _joined(item: dict[str, Any]) -> Joined:
    return Joined(item["value"], _join(item["join"]), item["requires_grad"], item["known"])


def _join(item: Any) -> Join:
    if isinstance(item, str):
        join: Literal["sum", "mean"] = "sum" if item == "sum" else "mean"
        return join
    return RowDim(item["rows"]["dim"], item["rows"]["per_row"])
