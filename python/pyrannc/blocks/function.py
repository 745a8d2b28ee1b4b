"""The Ops of one Stage as one Python function."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pyrannc.blocks.bindings import BINDINGS
from pyrannc.blocks.draw import Drawing, DrawnOp, law_of
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture import Captured
from pyrannc.capture.ops import opens_region
from pyrannc.capture.torch_internals import SET_GRAD_ENABLED
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import StagePart


class StageCode:
    """A Stage's Ops, generated from the captured graph.

    Args:
        captured: the captured model.
        facts: its Graph.
        part: what belongs to the Stage.
        device: where it runs; every device that the model named is replaced by it.
        randomness: where random numbers come from; without it, torch's generators as they stand.

    A call returns the Values sent on, the outputs, and the new contents of buffers.

    Attributes:
        updates: the new contents of buffers: the Value to store, by the buffer's Value.
        seeds_generator: True when some Op draws from the device's generator.
    """

    def __init__(
        self,
        captured: Captured,
        facts: GraphFacts,
        part: StagePart,
        device: torch.device,
        randomness: Randomness | None,
    ) -> None:
        made = {value for op in part.ops for value in facts.ops[op].results}
        self.updates = {
            facts.buffers[buffer].value: update
            for buffer in part.buffers
            if (update := facts.buffers[buffer].update) is not None and update in made
        }
        self._wanted = tuple(dict.fromkeys([*part.sends, *part.outputs, *self.updates.values()]))
        writer = _Writer(captured, facts, device, randomness)
        self._feeds = writer.write(part, self._wanted)
        self.seeds_generator = writer.seeds_generator
        self._draws_ahead = randomness.drawn_ahead if randomness is not None and writer.draws else _nothing_ahead
        self._module = fx.GraphModule(torch.nn.Module(), writer.graph)

    def __call__(self, rows: int, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Runs the Stage on ``rows`` rows; ``tensors`` holds every Value that it does not make itself."""
        with self._draws_ahead(self):
            results = self._module(rows, *[tensors[value] for value in self._feeds])
        return dict(zip(self._wanted, results, strict=True))


def _nothing_ahead(_: StageCode) -> AbstractContextManager[None]:
    return nullcontext()


class _Writer:
    """Copies Ops from the captured graph into a graph of their own."""

    def __init__(
        self, captured: Captured, facts: GraphFacts, device: torch.device, randomness: Randomness | None
    ) -> None:
        self.graph = fx.Graph()
        self.seeds_generator = self.draws = False
        self._captured = captured
        self._facts = facts
        self._device = device
        self._randomness = randomness
        self._value_of = {place: value for value, place in enumerate(captured.values)}
        self._nodes: dict[int, fx.Node] = {}
        self._handles: dict[fx.Node, fx.Node] = {}
        self._rows = self.graph.placeholder("rows")
        self._sizes: dict[tuple[int, int], Any] = {}

    def write(self, part: StagePart, wanted: Sequence[int]) -> tuple[int, ...]:
        """Writes the Stage and returns the Values that it takes as arguments, in order."""
        facts = self._facts
        feeds = [
            *(facts.params[param].value for param in part.params),
            *(facts.buffers[buffer].value for buffer in part.buffers),
            *(facts.constants[constant] for constant in part.constants),
            *(entry.value for entry in part.inputs),
            *part.receives,
        ]
        for value in feeds:
            self._nodes[value] = self.graph.placeholder(f"v{value}")
        for entry in part.inputs:
            # The user's tensors are never changed, even if the model works on them in place.
            if entry.value in facts.mutated_roots:
                self._nodes[entry.value] = self.graph.call_method("clone", (self._nodes[entry.value],))
        self._write_ops(part.ops)
        self.graph.output(tuple(self._nodes[value] for value in wanted))
        return tuple(feeds)

    def _write_ops(self, ops: Sequence[int]) -> None:
        ambient = None
        enabled = True
        for op in ops:
            facts = self._facts.ops[op]
            if facts.grad_enabled != enabled:
                ambient = ambient or self.graph.call_function(torch.is_grad_enabled)
                enabled = facts.grad_enabled
                self.graph.call_function(SET_GRAD_ENABLED, (ambient if enabled else False,))
            self._write_op(op)
        if not enabled:
            self.graph.call_function(SET_GRAD_ENABLED, (ambient,))

    def _write_op(self, op: int) -> None:
        original = self._captured.op_nodes[op]
        target, args, kwargs = original.target, original.args, original.kwargs
        randomness = self._randomness
        drawn = self._drawn(op, randomness) if randomness is not None and self._facts.ops[op].random else None
        if drawn is not None:
            target, (args, kwargs) = drawn, drawn.arguments(original)
        if target is torch.ops.aten.view.default and self._may_copy(op):
            # Other kernels than those without data may lay out memory so that a view is not possible.
            target = torch.ops.aten.reshape.default
        args, kwargs = map_aggregate(args, self._argument), map_aggregate(kwargs, self._argument)
        node = self.graph.create_node(original.op, BINDINGS.get(target, target), args, kwargs, name=original.name)
        if opens_region(original):
            self._handles[original] = node
        for value in self._facts.ops[op].results:
            _, place = self._captured.values[value]
            self._nodes[value] = node if place is None else self.graph.call_function(operator.getitem, (node, place))

    def _may_copy(self, op: int) -> bool:
        """True where nobody changes the memory of an Op's results in place."""
        facts = self._facts
        return not any(facts.root(value) in facts.mutated_roots for value in facts.ops[op].results)

    def _drawn(self, op: int, randomness: Randomness) -> DrawnOp | None:
        """What draws an Op's numbers by their place in the batch; None once the generator is set for those of torch."""
        facts, values, number = self._facts.ops[op], self._facts.values, self._captured.op_numbers[op]
        by_rows = facts.in_region or any(values[value].depends_on_rows for value in facts.results)
        first = values[facts.results[0]] if facts.results else None
        if first is not None and not facts.in_region:
            law = law_of(self._captured.op_nodes[op], first.dtype, randomness)
            if law is not None:
                self.draws = True
                return DrawnOp(law, Drawing(randomness, number, first.dtype, first.row_dim, by_rows))
        self.seeds_generator = True
        by_rows = by_rows or not facts.results or any(values[value].depends_on_rows for value in facts.operands)
        self.graph.call_function(randomness.placer(number, by_rows=by_rows))
        return None

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return self._device
        if not isinstance(item, fx.Node):
            return item
        dim = self._captured.dims.get(item)
        if dim is not None:
            return self._size(dim.per_row, dim.fixed)
        if item in self._handles:
            return self._handles[item]
        if (item, None) in self._value_of:
            return self._nodes[self._value_of[item, None]]
        assert item.target is operator.getitem, f"{item} is neither a Value nor a size"
        producer, place = item.args
        return self._nodes[self._value_of[producer, place]]  # type: ignore[index]  # getitem of an Op's results

    def _size(self, per_row: int, fixed: int) -> Any:
        if (per_row, fixed) not in self._sizes:
            size: Any = self._rows
            if per_row != 1:
                size = self.graph.call_function(operator.mul, (size, per_row))
            if fixed != 0:
                size = self.graph.call_function(operator.add, (size, fixed))
            self._sizes[per_row, fixed] = size
        return self._sizes[per_row, fixed]
