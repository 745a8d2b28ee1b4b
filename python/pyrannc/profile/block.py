"""One Block, alone on a device: its Ops, parameters of the right shapes, and something to feed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyrannc.blocks.channels_last import images
from pyrannc.blocks.compiler import Compiler
from pyrannc.blocks.conversion import conversions
from pyrannc.blocks.form import Meta
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture import Captured
from pyrannc.core.gradient_reach import Senders, gradient_senders
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Crossing, InputPart, StagePart
from pyrannc.profile.layout import CHANNELS_LAST, Layout

_PARAM_STD = 0.02


@dataclass(frozen=True)
class BlockSource:
    """Where Blocks come from.

    Attributes:
        captured: the captured model.
        facts: its Graph.
        crossings: the Values that go from one Block to later ones.
        samples: the Graph's inputs of some call, in their order; they give inputs their values.
        starts: the Graph's outputs that get gradients from outside.
        fused_dropout: as in the configuration.
        compiler: compiles Blocks where Spans are compiled.
        replayed: steps are replayed as CUDA graphs.
    """

    captured: Captured
    facts: GraphFacts
    crossings: Mapping[int, Crossing]
    samples: Sequence[Tensor]
    starts: frozenset[int]
    fused_dropout: bool
    compiler: Compiler | None = None
    replayed: bool = False

    @cached_property
    def conversions(self) -> dict[int, int]:
        """Ops that make working copies: by Op, the parameter's Value."""
        return conversions(self.captured, self.facts)

    @cached_property
    def images(self) -> frozenset[int]:
        """Values that lie with channels last where Spans are compiled."""
        return images(self.captured, self.facts) if self.compiler is not None else frozenset()

    @property
    def memory_budget_percent(self) -> int | None:
        """Of compiled Spans; None where nothing limits what they keep."""
        return None if self.compiler is None else self.compiler.memory_budget_percent

    @cached_property
    def senders(self) -> Senders:
        """From where gradients come to Values."""
        return gradient_senders(self.facts, self.starts)


@dataclass(frozen=True)
class Run:
    """A forward that is ready for its backward.

    Attributes:
        roots: results that a gradient comes back to.
        seeds: those gradients.
        inputs: leaves that the Block takes in and whose gradients it sends back.
        fresh: those among them whose gradients no later Block has begun.
        weights: leaves whose gradients stay with the Block.
    """

    roots: list[Tensor]
    seeds: list[Tensor]
    inputs: list[Tensor]
    fresh: list[Tensor]
    weights: list[Tensor]


class BlockCode:
    """A Block that can be run on any number of rows.

    Batch-free Ops that other Blocks use too are not part of it: a Stage runs them once for all of its Blocks. Their
    results come in from outside here, and so do working copies of parameters, which a Stage makes once a call.

    Args:
        source: where the Block comes from.
        place: of the Block among all.
        part: the Block as if it were a Stage.
        ops: what it computes for itself.
        device: where it runs.

    Attributes:
        span_hash: of the Span that it is in a Stage which has it all.
        randomness: from where it draws.
    """

    def __init__(
        self, source: BlockSource, place: int, part: StagePart, ops: Sequence[int], device: torch.device
    ) -> None:
        self._source = source
        self._place = place
        self._device = device
        self.randomness = Randomness(device, fused_dropout=source.fused_dropout)
        self._generator = torch.Generator(device).manual_seed(0)
        self.span_hash = part.spans[-1].hash
        part = replace(part, ops=tuple(op for op in part.ops if op not in source.conversions), prologue=None, spans=())
        ops = [op for op in ops if op not in source.conversions]
        own = set(ops)
        clones = tuple(op for op in part.ops if op not in own)
        self._shared = self._results_used_by(ops, clones)
        self._part = replace(part, ops=tuple(ops), receives=(*part.receives, *self._shared))
        self._code = StageCode(
            source.captured,
            source.facts,
            self._part,
            device,
            self.randomness,
            channels_last=source.compiler is not None,
        )
        shared = replace(part, ops=clones, inputs=(), receives=(), sends=self._shared, outputs=())
        self._shared_code = StageCode(source.captured, source.facts, shared, device, self.randomness)
        self._state = self._make_state(part)
        self._weights = [tensor for tensor in self._state.values() if tensor.requires_grad]
        for weight in self._weights:
            # Backwards add to gradients that are there, as in a step.
            weight.grad = torch.zeros_like(weight)

    @property
    def keeps_less(self) -> bool:
        """Its compiled code is to keep less from forward to backward."""
        return self._source.memory_budget_percent is not None

    def _results_used_by(self, ops: Sequence[int], makers: Sequence[int]) -> tuple[int, ...]:
        made = {value for op in makers for value in self._source.facts.ops[op].results}
        used = (value for op in ops for value in self._source.facts.ops[op].operands)
        return tuple(dict.fromkeys(value for value in used if value in made))

    def _make_state(self, part: StagePart) -> dict[int, Tensor]:
        """Parameters, or their working copies, buffers and constants by Value."""
        facts = self._source.facts
        copy_of = {value: facts.ops[op].results[0] for op, value in self._source.conversions.items()}
        state = {}
        for param in part.params:
            value = facts.params[param].value
            value = copy_of.get(value, value)
            state[value] = self._random(value, rows=1).mul_(_PARAM_STD)
            state[value].requires_grad_(facts.values[value].requires_grad)
        for buffer in part.buffers:
            value = facts.buffers[buffer].value
            # Ones are a variance, and a mask under which everything is seen.
            dtype = facts.values[value].dtype
            fill = torch.ones if dtype.is_floating_point or dtype == torch.bool else torch.zeros
            state[value] = fill(facts.values[value].shape_at(1), dtype=dtype, device=self._device)
        for constant in part.constants:
            state[facts.constants[constant]] = self._source.captured.constants[constant].to(self._device)
        return state

    def feeds(self, rows: int) -> dict[int, Tensor]:
        """What comes in from outside, by Value: the Graph's inputs, the Values of earlier Blocks, and shared ones."""
        feeds = {part.value: self._input(part, rows) for part in self._part.inputs}
        with torch.no_grad():
            shared = self._shared_code(rows, self._state)
        for value in self._part.receives:
            made = shared[value].detach() if value in shared else self._random(value, rows)
            feeds[value] = made.requires_grad_(self._source.facts.values[value].requires_grad)
            if feeds[value].requires_grad and self._is_used_later(value):
                feeds[value].grad = torch.zeros_like(feeds[value])
        return feeds

    def _is_used_later(self, value: int) -> bool:
        """True when a later Block uses a Value too: in a backward that one has begun its gradient."""
        return value in self._shared or max(self._source.crossings[value].targets) > self._place

    def _input(self, part: InputPart, rows: int) -> Tensor:
        """The sample's rows, repeated as often as needed."""
        sample = self._source.samples[part.index].detach().to(self._device, copy=True)
        if part.has_rows:
            one_row = self._source.facts.values[part.value].shape_at(1)
            if sample.shape[0] == 0:
                sample = torch.zeros(one_row, device="cpu").to(sample)
            places = torch.arange(rows * one_row[0], device=self._device) % sample.shape[0]
            sample = sample.index_select(0, places)
        return sample.requires_grad_(part.requires_grad)

    def _random(self, value: int, rows: int) -> Tensor:
        """Normal numbers, fair coins, or zeros, which are valid indices, laid out as in a step."""
        facts = self._source.facts.values[value]

        def fill(shape: Sequence[int]) -> Tensor:
            if facts.dtype.is_floating_point or facts.dtype.is_complex:
                return torch.empty(shape, dtype=facts.dtype, device=self._device).normal_(generator=self._generator)
            if facts.dtype == torch.bool:
                return torch.rand(shape, device=self._device, generator=self._generator) < 0.5
            return torch.zeros(shape, dtype=facts.dtype, device=self._device)

        layout = CHANNELS_LAST if value in self._source.images else Layout.of(self._source.captured.value(value))
        return layout.make(facts.shape_at(rows), fill)

    @property
    def keeps_whole(self) -> bool:
        """True when some Op's backward runs once."""
        return self._code.keeps_whole

    def compile(self, rows: int, feeds: Mapping[int, Tensor]) -> bool:
        """Lets it run as a Stage's Spans do on so many rows; false if it stays as it is."""
        compiler, code = self._source.compiler, self._code
        if compiler is None:
            return False
        known = {value: Meta.of(tensor) for value, tensor in {**self._state, **feeds}.items()}
        tasks = compiler.tasks(code, self._source.facts, rows, known, self._source.senders, trains=True)
        return all(compiler.compile(task, code) is None for task in tasks)

    def leave_as_it_is(self) -> None:
        """Lets it run without compiled code again."""
        for span in self._code.spans:
            span.fitted.clear()

    def forward(self, rows: int, feeds: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Runs the Block as a step does, new contents of buffers included."""
        self.randomness.at([(0, rows)])
        results = self._code(rows, {**self._state, **feeds})
        with torch.no_grad():
            for buffer, update in self._code.updates.items():
                self._state[buffer].copy_(results[update])
        return results

    def prepare_backward(self, feeds: Mapping[int, Tensor], results: Mapping[int, Tensor]) -> Run:
        """A forward's results with gradients to start from."""
        sent = [value for value in self._part.sends if self._source.crossings[value].requires_grad]
        started = self._source.starts.intersection(self._part.outputs)
        roots = [results[value] for value in {*started, *sent} if results[value].requires_grad]
        inputs = {value: feed for value, feed in feeds.items() if feed.requires_grad}
        return Run(
            roots=roots,
            # A GPU at its power limit is faster where numbers are alike, as those of a step are not.
            seeds=[torch.empty_like(root).normal_(generator=self._generator) for root in roots],
            inputs=list(inputs.values()),
            fresh=[feed for feed in inputs.values() if feed.grad is None],
            weights=self._weights,
        )
