"""Ops of one Stage as Python functions: one for each Span, and one that calls them in their order."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from pyrannc.blocks.channels_last import convolutions_of_images
from pyrannc.blocks.placed import PlacedSpan
from pyrannc.blocks.randomness import Randomness
from pyrannc.blocks.span import SpanFunction
from pyrannc.capture import Captured
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import SpanPart, StagePart


class Watch(Protocol):
    """Is told of each Span of a Stage."""

    def before(self, span: int) -> None:
        """The Span at a place is about to compute."""

    def after(self, span: int, results: Any) -> None:
        """It has: one Value by itself, others as a tuple."""

    def backward(self) -> AbstractContextManager[None]:
        """A backward of the Stage runs inside."""

    def pass_by(self, *, backward: bool) -> None:
        """Others compute a forward or backward."""

    def begin_run(self, *, backward: bool) -> None:
        """Computations of a run follow, backwards alone or not."""

    def end_run(self) -> None:
        """No computation follows in this run."""

    def alone(self) -> AbstractContextManager[None]:
        """Inside, this rank computes by itself."""


class StageCode:
    """A Stage's Ops, generated from the captured graph.

    Args:
        captured: the captured model.
        facts: its Graph.
        part: what belongs to the Stage, without a prologue; without Spans, all its Ops are one.
        device: where it runs; every device that the model named is replaced by it.
        randomness: where random numbers come from; without it, torch's generators as they stand.
        watch: is told of each Span before it computes, and after it.
        channels_last: convolutions get their images so, as compiled ones want them.

    A call returns the Values sent on, the outputs, and the new contents of buffers.

    Attributes:
        functions: by hash, what Spans that are alike share.
        spans: in the order in which they run.
        randomness: as given.
        updates: the new contents of buffers: the Value to store, by the buffer's Value.
        seeds_generator: True when some Op draws from the device's generator.
        seeds_others: True when some Op draws from those of Python and NumPy, too.
        keeps_whole: True when some Op runs code that was not captured, or a hook of gradients: its backward runs once.
    """

    def __init__(
        self,
        captured: Captured,
        facts: GraphFacts,
        part: StagePart,
        device: torch.device,
        randomness: Randomness | None,
        watch: Watch | None = None,
        *,
        channels_last: bool = False,
    ) -> None:
        self.watch = watch
        made = {value for op in part.ops for value in facts.ops[op].results}
        self.updates = {
            facts.buffers[buffer].value: update
            for buffer in part.buffers
            if (update := facts.buffers[buffer].update) is not None and update in made
        }
        targets = [captured.op_nodes[op].target for op in part.ops]
        self.keeps_whole = any(isinstance(target, OpaqueCall) and not target.is_known for target in targets)
        self._wanted = tuple(dict.fromkeys([*part.sends, *part.outputs, *self.updates.values()]))
        inputs = {entry.value for entry in part.inputs}
        assert part.prologue is None, "what runs once a step is a code of its own"
        spans = part.spans or (_whole(facts, part.ops, inputs, self._wanted),)
        laid_out = convolutions_of_images(captured) if channels_last else frozenset()
        self.functions: dict[str, SpanFunction] = {}
        for span in spans:
            if span.hash not in self.functions:
                self.functions[span.hash] = SpanFunction(captured, facts, span, inputs, device, randomness, laid_out)
        self.randomness = randomness
        self.spans = [
            PlacedSpan(span, self.functions[span.hash], self.functions[span.hash].numbers(captured, span))
            for span in spans
        ]
        functions = self.functions.values()
        self.seeds_generator = any(function.seeds_generator for function in functions)
        self.seeds_others = any(function.seeds_others for function in functions)
        draws = any(function.draws for function in functions)
        self._draws_ahead = randomness.drawn_ahead if randomness is not None and draws else _nothing_ahead
        self._feeds = _feeds(spans, self._wanted)
        graph = self._write()
        self._call = fx.GraphModule(torch.nn.Module(), graph).forward

    def __call__(self, rows: int, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Runs the Stage on ``rows`` rows; ``tensors`` holds every Value that it does not make itself."""
        with self._draws_ahead(self):
            results = self._call(rows, *[tensors[value] for value in self._feeds])
        return dict(zip(self._wanted, results, strict=True))

    def compiled_for(self, sizes: Set[int]) -> list[object]:
        """The compiled code of its Spans for some numbers of rows."""
        fitted = [item for span in self.spans for item in span.fitted.items()]
        return [found.code for (rows, *_), found in fitted if rows in sizes]

    def _write(self) -> fx.Graph:
        """A function that calls those of the Spans; what none of the later ones takes is let go."""
        graph = fx.Graph()
        rows = graph.placeholder("rows")
        values = {value: graph.placeholder(f"v{value}") for value in self._feeds}
        for place, placed in enumerate(self.spans):
            span = placed.part
            if self.watch is not None:
                graph.call_function(self.watch.before, (place,))
            results = graph.call_function(placed, (rows, *(values[value] for value in span.takes)))
            if self.watch is not None:
                graph.call_function(self.watch.after, (place, results))
            if len(span.gives) == 1:
                values[span.gives[0]] = results
            else:
                for index, value in enumerate(span.gives):
                    values[value] = graph.call_function(operator.getitem, (results, index))
        graph.output(tuple(values[value] for value in self._wanted))
        return graph


def _nothing_ahead(_: StageCode) -> AbstractContextManager[None]:
    return nullcontext()


def _whole(facts: GraphFacts, ops: Sequence[int], inputs: set[int], wanted: Sequence[int]) -> SpanPart:
    """All Ops as one Span."""
    made = {value for op in ops for value in facts.ops[op].results}
    used = dict.fromkeys(value for op in ops for value in facts.ops[op].operands if value not in made)
    given = tuple(value for value in wanted if value in made or (value in inputs and value in used))
    return SpanPart(tuple(ops), tuple(used), given, hash="whole")


def _feeds(spans: Sequence[SpanPart], wanted: Sequence[int]) -> tuple[int, ...]:
    """The Values that come from outside."""
    feeds: dict[int, None] = {}
    given: set[int] = set()
    for span in spans:
        feeds.update(dict.fromkeys(value for value in span.takes if value not in given))
        given.update(span.gives)
    feeds.update(dict.fromkeys(value for value in wanted if value not in given))
    return tuple(feeds)
