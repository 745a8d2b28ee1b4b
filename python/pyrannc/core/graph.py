"""The captured Graph's facts that the runtime needs, by id."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pyrannc.core.partition import RowDim


@dataclass(frozen=True)
class ValueFacts:
    """A Value: ``shape`` holds ``(per_row, fixed)`` for each dimension, ``row_dim`` the one proven to hold rows."""

    name: str
    dtype: torch.dtype
    shape: tuple[tuple[int, int], ...]
    requires_grad: bool
    alias_of: int | None
    row_dim: RowDim | None

    @property
    def depends_on_rows(self) -> bool:
        """True when some extent does."""
        return any(per_row for per_row, _ in self.shape)

    @property
    def rows_by_shape(self) -> RowDim | None:
        """The one dimension that is a multiple of the rows, proven or not."""
        dims = [(dim, per_row, fixed) for dim, (per_row, fixed) in enumerate(self.shape) if per_row]
        if len(dims) != 1 or dims[0][2]:
            return None
        return RowDim(dims[0][0], dims[0][1])

    @property
    def rows_of_output(self) -> RowDim | None:
        """Where an output that each rank gets its own rows of has them: what the tail makes has them by its shape."""
        return self.row_dim or self.rows_by_shape

    def shape_at(self, rows: int) -> list[int]:
        """The extents for ``rows`` rows."""
        return [per_row * rows + fixed for per_row, fixed in self.shape]


@dataclass(frozen=True)
class OpFacts:
    """An Op; ``takes_batch_size``: an argument is computed from the number of rows; ``row_group``: those with the same
    treat each row by itself together."""

    operands: tuple[int, ...]
    results: tuple[int, ...]
    mutates: tuple[int, ...]
    grad_enabled: bool
    random: bool
    in_region: bool
    row_group: int | None
    takes_batch_size: bool


@dataclass(frozen=True)
class ParamFacts:
    """A Param with all its names."""

    names: tuple[str, ...]
    value: int


@dataclass(frozen=True)
class BufferFacts:
    """A buffer; ``update`` is the Value that the forward assigned to it."""

    name: str
    value: int
    update: int | None


@dataclass(frozen=True)
class GraphFacts:
    """The Graph by id."""

    values: tuple[ValueFacts, ...]
    ops: tuple[OpFacts, ...]
    params: tuple[ParamFacts, ...]
    buffers: tuple[BufferFacts, ...]
    constants: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first_use: dict[int, int]

    @staticmethod
    def from_json(text: str, row_dims: Sequence[tuple[int, int] | None]) -> GraphFacts:
        """Reads the core's Graph, with what it proves of the Values' rows."""
        graph = json.loads(text)
        ops = tuple(_op(item) for item in graph["ops"])
        return GraphFacts(
            values=tuple(_value(item, rows) for item, rows in zip(graph["values"], row_dims, strict=True)),
            ops=ops,
            params=tuple(ParamFacts((p["name"], *p.get("aliases", ())), p["value"]) for p in graph["params"]),
            buffers=tuple(BufferFacts(b["name"], b["value"], b.get("update")) for b in graph["buffers"]),
            constants=tuple(item["value"] for item in graph["constants"]),
            inputs=tuple(graph["inputs"]),
            outputs=tuple(graph["outputs"]),
            first_use=_first_use(ops),
        )

    @cached_property
    def mutated_roots(self) -> frozenset[int]:
        """Values whose storage some Op changes in place, under their first name."""
        return frozenset(self.root(value) for op in self.ops for value in op.mutates)

    @cached_property
    def buffers_changed_alike(self) -> frozenset[int]:
        """Buffers that the forward changes by what is the same for any rows, so that each part of a batch does."""
        roots, varying = self._varying_roots()
        changed = [buffer for buffer in self.buffers if buffer.update is not None or buffer.value in self.mutated_roots]
        return frozenset(
            buffer.value
            for buffer in changed
            if buffer.value not in varying and (buffer.update is None or roots[buffer.update] not in varying)
        )

    def _varying_roots(self) -> tuple[list[int], set[int]]:
        """By Value its storage under its first name, and the storages whose contents depend on a batch, or on one
        that came before."""
        roots = list(map(self.root, range(len(self.values))))
        varying = {roots[value] for value in self.inputs if self.values[value].depends_on_rows}
        known = -1
        while len(varying) > known:
            known = len(varying)
            for op in self.ops:
                if (
                    op.takes_batch_size
                    or any(roots[value] in varying for value in op.operands)
                    or any(self.values[value].depends_on_rows for value in op.results)
                ):
                    varying.update(roots[value] for value in (*op.results, *op.mutates))
            assigned = (buffer for buffer in self.buffers if buffer.update is not None)
            varying.update(buffer.value for buffer in assigned if roots[buffer.update or 0] in varying)
        return roots, varying

    def root(self, value: int) -> int:
        """The Value whose storage a Value has, under its first name."""
        while (parent := self.values[value].alias_of) is not None:
            value = parent
        return value


def _value(item: dict[str, Any], rows: tuple[int, int] | None) -> ValueFacts:
    return ValueFacts(
        name=item["name"],
        dtype=getattr(torch, item["dtype"]),
        shape=tuple((dim["per_row"], dim["fixed"]) for dim in item["shape"]),
        requires_grad=item["requires_grad"],
        alias_of=item.get("alias_of"),
        row_dim=None if rows is None else RowDim(*rows),
    )


def _op(item: dict[str, Any]) -> OpFacts:
    args = [*item["args"], *item.get("kwargs", {}).values()]
    return OpFacts(
        operands=tuple(_operands(args)),
        results=tuple(item["results"]),
        mutates=tuple(item.get("mutates", ())),
        grad_enabled=item["grad_enabled"],
        random=item.get("random", False),
        in_region=item.get("region") is not None,
        row_group=item.get("row_group"),
        takes_batch_size=any(map(_is_of_batch_size, args)),
    )


def _first_use(ops: Sequence[OpFacts]) -> dict[int, int]:
    first: dict[int, int] = {}
    for index, op in enumerate(ops):
        for value in op.operands:
            first.setdefault(value, index)
    return first


def _is_of_batch_size(arg: Any) -> bool:
    if not isinstance(arg, dict):
        return False
    return bool(arg.get("dim", {}).get("per_row")) or any(map(_is_of_batch_size, arg.get("list", ())))


def _operands(args: list[Any]) -> Iterator[int]:
    for arg in args:
        if isinstance(arg, dict) and "value" in arg:
            yield arg["value"]
        elif isinstance(arg, dict) and "list" in arg:
            yield from _operands(arg["list"])
