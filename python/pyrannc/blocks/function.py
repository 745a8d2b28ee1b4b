"""The Ops of one Stage as one Python function."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pyrannc.blocks.randomness import Randomness
from pyrannc.capture import Captured
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
        randomness: places the random number generator before each Op that draws.

    A call returns the Values sent on, the outputs, and the new contents of buffers.

    Attributes:
        updates: the new contents of buffers: the Value to store, by the buffer's Value.
        random: True when some Op draws random numbers.
    """

    def __init__(
        self, captured: Captured, facts: GraphFacts, part: StagePart, device: torch.device, randomness: Randomness
    ) -> None:
        made = {value for op in part.ops for value in facts.ops[op].results}
        self.updates = {
            facts.buffers[buffer].value: update
            for buffer in part.buffers
            if (update := facts.buffers[buffer].update) is not None and update in made
        }
        self._wanted = tuple(dict.fromkeys([*part.sends, *part.outputs, *self.updates.values()]))
        self.random = any(facts.ops[op].random for op in part.ops)
        writer = _Writer(captured, facts, device, randomness)
        self._feeds = writer.write(part, self._wanted)
        self._module = fx.GraphModule(torch.nn.Module(), writer.graph)

    def __call__(self, rows: int, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Runs the Stage on ``rows`` rows; ``tensors`` holds every Value that it does not make itself."""
        results = self._module(rows, *[tensors[value] for value in self._feeds])
        return dict(zip(self._wanted, results, strict=True))


class _Writer:
    """Copies Ops from the captured graph into a graph of their own."""

    def __init__(self, captured: Captured, facts: GraphFacts, device: torch.device, randomness: Randomness) -> None:
        self.graph = fx.Graph()
        self._captured = captured
        self._facts = facts
        self._device = device
        self._randomness = randomness
        self._value_of = {place: value for value, place in enumerate(captured.values)}
        self._nodes: dict[int, fx.Node] = {}
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
            if facts.random:
                self.graph.call_function(self._randomness.placer(op))
            self._write_op(op)
        if not enabled:
            self.graph.call_function(SET_GRAD_ENABLED, (ambient,))

    def _write_op(self, op: int) -> None:
        original = self._captured.op_nodes[op]
        args = map_aggregate(original.args, self._argument)
        kwargs = map_aggregate(original.kwargs, self._argument)
        node = self.graph.create_node(original.op, original.target, args, kwargs, name=original.name)
        for value in self._facts.ops[op].results:
            _, place = self._captured.values[value]
            self._nodes[value] = node if place is None else self.graph.call_function(operator.getitem, (node, place))

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return self._device
        if not isinstance(item, fx.Node):
            return item
        dim = self._captured.dims.get(item)
        if dim is not None:
            return self._size(dim.per_row, dim.fixed)
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
