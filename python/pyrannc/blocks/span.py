"""Ops as one Python function of all that they use and do not make, so that equal layers share one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pyrannc.blocks.bindings import BINDINGS
from pyrannc.blocks.channels_last import DIMS
from pyrannc.blocks.compiled import SpanCode
from pyrannc.blocks.described import described
from pyrannc.blocks.draw import DrawnOp, law_of
from pyrannc.blocks.form import Form
from pyrannc.blocks.joint import Seen
from pyrannc.blocks.one_row import gradient_laid_out, needs_gradient_laid_out
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture import Captured
from pyrannc.capture.nodes.ops import opens_region
from pyrannc.capture.torch_internals.levels import ending_regions
from pyrannc.capture.torch_internals.operators import SET_GRAD_ENABLED, OpOverload
from pyrannc.capture.torch_internals.tensors import leads_nowhere
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import SpanPart


def without_gradient(made: Tensor) -> Tensor:
    """A view that was made while autograd was off: torch says that it requires gradients, but none goes through it."""
    return made.detach() if leads_nowhere(made) else made


def _with_channels_last(image: Tensor) -> Tensor:
    return image.contiguous(memory_format=torch.channels_last)


class SpanFunction:
    """A function, generated from the captured graph, for every Span with the same hash.

    Args:
        captured: the captured model.
        facts: its Graph.
        part: one of the Spans.
        inputs: Values that belong to the user, who never sees them changed.
        device: where it runs; every device that the model named is replaced by it.
        randomness: where random numbers come from; without it, torch's generators as they stand.
        channels_last: Ops that get their first operand so.

    Attributes:
        call: takes the rows, the numbers of the Ops that draw, and what the Span takes; returns what it gives: one
            Value by itself, others as a tuple.
        draws: True when some Op draws by its place in the batch.
        seeds_generator: True when some Op draws from the device's generator.
        seeds_others: True when some Op draws from those of Python and NumPy, too.
        obstacle: why it cannot be compiled, if that is known without a try.
        seen: by form, what a run without data has shown, or why there cannot be one.
        codes: by form and whether only deterministic kernels may run, compiled code, or why there is none.
    """

    def __init__(
        self,
        captured: Captured,
        facts: GraphFacts,
        part: SpanPart,
        inputs: AbstractSet[int],
        device: torch.device,
        randomness: Randomness | None,
        channels_last: AbstractSet[int] = frozenset(),
    ) -> None:
        writer = _Writer(captured, facts, device, randomness, channels_last)
        writer.write(part, inputs)
        self._drawing = [place for place, op in enumerate(part.ops) if facts.ops[op].random]
        self.draws, self.seeds_generator = writer.draws, writer.seeds_generator
        self.seeds_others = writer.seeds_others
        self.obstacle = _obstacle(captured, facts, part)
        self.seen: dict[Form, Seen | str] = {}
        self.codes: dict[tuple[Form, bool], SpanCode | str] = {}
        self._graph = writer.graph
        module = fx.GraphModule(torch.nn.Module(), writer.graph)
        function = type(module).forward
        function.__name__, function.__module__ = f"span_{part.hash[:8]}", __name__
        # An error inside of a region, be it of memory, would leave it open for the rest of the process.
        self.call: Callable[..., Any] = ending_regions(module.forward) if writer.opens_regions else module.forward

    @cached_property
    def text(self) -> str | None:
        """All of it as text; None where some part has none."""
        return described(self._graph, {_with_channels_last: "channels last", without_gradient: "without gradient"})

    def numbers(self, captured: Captured, part: SpanPart) -> list[int]:
        """The numbers of the Ops that draw, of a Span with the function's hash."""
        return [captured.op_numbers[part.ops[place]] for place in self._drawing]


def _obstacle(captured: Captured, facts: GraphFacts, part: SpanPart) -> str | None:
    """Why a Span cannot be compiled: code of others, whose effects nobody knows, and regions, which are no Ops."""
    for op in part.ops:
        target = captured.op_nodes[op].target
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            return f"{captured.place(op)} is not an operator of torch"
        if facts.ops[op].in_region:
            return f"{captured.place(op)} runs inside of a region, such as torch.vmap"
    return None


class _Writer:
    """Copies Ops from the captured graph into a graph of their own."""

    def __init__(
        self,
        captured: Captured,
        facts: GraphFacts,
        device: torch.device,
        randomness: Randomness | None,
        channels_last: AbstractSet[int],
    ) -> None:
        self.graph = fx.Graph()
        self.seeds_generator = self.seeds_others = self.draws = self.opens_regions = False
        self._captured = captured
        self._facts = facts
        self._device = device
        self._randomness = randomness
        self._channels_last = channels_last
        self._value_of = {place: value for value, place in enumerate(captured.values)}
        self._nodes: dict[int, fx.Node] = {}
        self._numbers: dict[int, fx.Node] = {}
        self._handles: dict[fx.Node, fx.Node] = {}
        self._rows = self.graph.placeholder("rows")
        self._sizes: dict[tuple[int, int], Any] = {}

    def write(self, part: SpanPart, inputs: AbstractSet[int]) -> None:
        """Writes the Span; ``inputs``: Values that belong to the user."""
        for op in part.ops:
            if self._facts.ops[op].random:
                self._numbers[op] = self.graph.placeholder(f"number_{len(self._numbers)}")
        for place, value in enumerate(part.takes):
            self._nodes[value] = self.graph.placeholder(f"taken_{place}")
        for value in part.takes:
            # The user's tensors are never changed, even if the model works on them in place.
            if value in inputs and value in self._facts.mutated_roots:
                self._nodes[value] = self.graph.call_method("clone", (self._nodes[value],))
        self._write_ops(part.ops)
        given = tuple(self._given(value) for value in part.gives)
        self.graph.output(given[0] if len(given) == 1 else given)

    def _given(self, value: int) -> fx.Node:
        """What is given for a Value: the user gets what lies as the model lays it out."""
        node = self._nodes[value]
        is_image = bool(self._channels_last) and len(self._facts.values[value].shape) == DIMS
        if is_image and value in self._facts.outputs and self._captured.value(value).is_contiguous():
            return self.graph.call_method("contiguous", (node,))
        return node

    def _write_ops(self, ops: Sequence[int]) -> None:
        ambient = None
        enabled = True
        for op in ops:
            facts = self._facts.ops[op]
            if facts.grad_enabled != enabled:
                ambient = ambient or self.graph.call_function(torch.is_grad_enabled)
                enabled = facts.grad_enabled
                self.opens_regions = True
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
        if op in self._channels_last:
            args = (self.graph.call_function(_with_channels_last, (args[0],)), *args[1:])
        if drawn is not None:
            args = (self._numbers[op], *args)
        node = self.graph.create_node(original.op, BINDINGS.get(target, target), args, kwargs, name=original.name)
        if opens_region(original):
            self._handles[original] = node
            self.opens_regions = True
        for value in self._facts.ops[op].results:
            _, place = self._captured.values[value]
            made = node if place is None else self.graph.call_function(operator.getitem, (node, place))
            is_view = self._facts.root(value) != value and not self._facts.ops[op].mutates
            if is_view and not self._facts.ops[op].grad_enabled:
                made = self.graph.call_function(without_gradient, (made,))
            if needs_gradient_laid_out(original, self._device):
                made = self.graph.call_function(gradient_laid_out, (made,))
            self._nodes[value] = made

    def _may_copy(self, op: int) -> bool:
        """True where nobody changes the memory of an Op's results in place."""
        facts = self._facts
        return not any(facts.root(value) in facts.mutated_roots for value in facts.ops[op].results)

    def _drawn(self, op: int, randomness: Randomness) -> DrawnOp | None:
        """What draws an Op's numbers by their place in the batch; None once the generator is set for those of torch."""
        facts, values = self._facts.ops[op], self._facts.values
        by_rows = facts.in_region or any(values[value].depends_on_rows for value in facts.results)
        first = values[facts.results[0]] if facts.results else None
        if first is not None and not facts.in_region:
            law = law_of(self._captured.op_nodes[op], first.dtype, randomness)
            if law is not None:
                self.draws = True
                return DrawnOp(law, randomness, first.dtype, first.row_dim, by_rows)
        self.seeds_generator = True
        by_rows = by_rows or not facts.results or any(values[value].depends_on_rows for value in facts.operands)
        elsewhere = getattr(self._captured.op_nodes[op].target, "draws_elsewhere", False)
        self.seeds_others |= elsewhere
        placer = randomness.placer(by_rows=by_rows, elsewhere=elsewhere)
        self.graph.call_function(placer, (self._numbers[op],))
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
