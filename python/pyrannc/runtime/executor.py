"""Runs one rank's Actions.

A microbatch lives here from its forward to its backward. Tensors that come from other ranks are leaves
of the Stage's autograd graph; their gradients go back where the tensors came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.core.graph import GraphFacts
from pyrannc.core.program import Action, Backward, Forward, InputPart, Parts, Piece, RankProgram, Recv, Rows, Send
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.position import ActionRecord
from pyrannc.runtime.rows import join_rows, take_rows
from pyrannc.runtime.timing import Kind, StepMarks, Timing
from pyrannc.store.gradients import Gradients, GradientSet


@dataclass
class StageContext:
    """What a rank's Stage works with, from deployment to deployment.

    Attributes:
        params: leaves by Value id.
        buffers: the Stage's buffers and constants by Value id.
        stage_of: the Stage of each rank.
    """

    facts: GraphFacts
    parts: Parts
    stage: int
    code: StageCode
    params: Mapping[int, Tensor]
    buffers: Mapping[int, Tensor]
    stage_of: Sequence[int]
    channels: Channels
    gradients: Gradients
    randomness: Randomness
    record: ActionRecord
    timing: Timing
    device: torch.device


@dataclass
class _Microbatch:
    """A microbatch between its forward and its backward."""

    feeds: dict[int, Tensor] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)


_Arrivals = dict[tuple[int, str], list[tuple[int, Piece, Tensor, dist.Work]]]


class StepExecution:
    """One step of one rank.

    Args:
        context: the Stage.
        program: the rank's Actions.
        inputs: the Stage's inputs by microbatch and Value; none for microbatches without rows here.
        marks: where to note when computations run.
    """

    def __init__(
        self,
        context: StageContext,
        program: RankProgram,
        inputs: Mapping[tuple[int, int], Tensor],
        marks: StepMarks | None,
    ) -> None:
        self._context = context
        self._program = program
        self._inputs = inputs
        self._marks = marks
        self._part = context.parts.stages[context.stage]
        self._live: dict[int, _Microbatch] = {}
        self._arrivals: _Arrivals = defaultdict(list)
        self._input_parts = {part.value: part for part in self._part.inputs}
        self._trains = program.mode != "forward"
        self._last_backward = _last_backward(program)
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_grads: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def run(
        self,
        actions: Sequence[Action],
        current: GradientSet | None,
        seeds: Callable[[int, int], Tensor | None],
        *,
        first_record: int = 0,
        keep_graph: bool = False,
        reduce: bool = True,
    ) -> None:
        """Runs Actions in order.

        Args:
            current: where gradients go; ``None`` for a run without backwards.
            seeds: the gradient of an output of a microbatch, by microbatch and Value.
            first_record: place of the first Action in the record.
            keep_graph: backwards leave the autograd graph alive.
            reduce: sum gradients over ranks.
        """
        for index, action in enumerate(actions, first_record):
            self._context.record.enter(index)
            if isinstance(action, Forward):
                self._forward(action.microbatch)
            elif isinstance(action, Backward):
                self._backward(action.microbatch, seeds, keep_graph=keep_graph, reduce=reduce)
            elif isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Recv):
                self._receive(action)
            elif current is not None:
                if reduce:
                    self._context.gradients.reduce(current)
                else:
                    self._context.gradients.settle(current)
        self._context.channels.finish()
        if current is not None and self._marks is not None:
            self._marks.finish()

    def _timed(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._marks is None else self._marks.span(kind, microbatch)

    def _rows_in(self, microbatch: int) -> int:
        lo, hi = self._program.rows[microbatch]
        return hi - lo

    def _forward(self, microbatch: int) -> None:
        context = self._context
        live = _Microbatch()
        for part in self._part.inputs:
            live.feeds[part.value] = self._input(part, microbatch)
        for value in self._part.receives:
            live.feeds[value] = self._arrived_value(value, microbatch)
        self._arrivals.pop((microbatch, "value"), None)
        context.randomness.at(self._program.global_rows[microbatch])
        tensors = {**context.params, **context.buffers, **live.feeds}
        with self._timed("forward", microbatch):
            with torch.set_grad_enabled(self._trains):
                live.results = context.code(self._rows_in(microbatch), tensors)
            self._store_updates(live.results)
        for value in self._part.outputs:
            self.outputs[microbatch, value] = live.results[value].detach()
        self._live[microbatch] = live

    def _store_updates(self, results: Mapping[int, Tensor]) -> None:
        with torch.no_grad():
            for buffer, update in self._context.code.updates.items():
                self._context.buffers[buffer].copy_(results[update])

    def _input(self, part: InputPart, microbatch: int) -> Tensor:
        tensor = self._inputs[microbatch, part.value].detach()
        return tensor.requires_grad_() if self._trains and part.requires_grad else tensor

    def _arrived_value(self, value: int, microbatch: int) -> Tensor:
        crossing = self._context.parts.crossings[value]
        pieces = []
        for _, piece, tensor, work in self._arrivals[microbatch, "value"]:
            if piece.value == value:
                work.wait()
                pieces.append((piece.rows, tensor))
        joined = join_rows(pieces, crossing.row_dim)
        return joined.requires_grad_() if self._trains and crossing.requires_grad else joined

    def _backward(
        self, microbatch: int, seeds: Callable[[int, int], Tensor | None], *, keep_graph: bool, reduce: bool
    ) -> None:
        live = self._live[microbatch] if keep_graph else self._live.pop(microbatch)
        roots, grads = [], []
        for value in self._part.outputs:
            seed = seeds(microbatch, value)
            if seed is not None and live.results[value].requires_grad:
                roots.append(live.results[value])
                grads.append(seed)
        for value in self._part.sends:
            if self._context.parts.crossings[value].requires_grad:
                grad = self._arrived_gradient(value, microbatch)
                if live.results[value].requires_grad:
                    roots.append(live.results[value])
                    grads.append(grad)
        self._arrivals.pop((microbatch, "grad"), None)
        if reduce and microbatch == self._last_backward:
            self._context.gradients.expect_last()
        with self._timed("backward", microbatch):
            if roots:
                torch.autograd.backward(roots, grads, retain_graph=keep_graph)
            self._collect_gradients(microbatch, live)

    def _collect_gradients(self, microbatch: int, live: _Microbatch) -> None:
        """Takes the gradients of what came in off the leaves."""
        gradients = {}
        for value, feed in live.feeds.items():
            if feed.requires_grad:
                gradients[value] = torch.zeros_like(feed) if feed.grad is None else feed.grad
                feed.grad = None
                if value in self._input_parts:
                    self._add_input_grad(microbatch, self._input_parts[value], gradients[value])
        self._gradients = gradients

    def _add_input_grad(self, microbatch: int, part: InputPart, grad: Tensor) -> None:
        key = (microbatch if part.has_rows else 0, part.value)
        known = self.input_grads.get(key)
        self.input_grads[key] = grad if known is None else known + grad

    def _arrived_gradient(self, value: int, microbatch: int) -> Tensor:
        """The sum of the gradients that the consuming Stages sent back."""
        row_dim = self._context.parts.crossings[value].row_dim
        by_stage: dict[int, list[tuple[Rows, Tensor]]] = defaultdict(list)
        for peer, piece, tensor, work in self._arrivals[microbatch, "grad"]:
            if piece.value == value:
                work.wait()
                by_stage[self._context.stage_of[peer]].append((piece.rows, tensor))
        joined = [join_rows(pieces, row_dim) for _, pieces in sorted(by_stage.items())]
        total = joined[0]
        for other in joined[1:]:
            total = total + other
        return total

    def _send(self, message: Send) -> None:
        first = self._program.rows[message.microbatch][0]
        source = self._live[message.microbatch].results if message.kind == "value" else self._gradients
        bounded = message.kind == "grad" or not self._trains
        for piece in message.pieces:
            row_dim = self._context.parts.crossings[piece.value].row_dim
            rows = (piece.rows[0] - first, piece.rows[1] - first)
            tensor = take_rows(source[piece.value].detach(), row_dim, rows).contiguous()
            self._context.channels.send(message.peer, tensor, bounded=bounded)

    def _receive(self, message: Recv) -> None:
        for piece in message.pieces:
            facts = self._context.facts.values[piece.value]
            shape = facts.shape_at(piece.rows[1] - piece.rows[0])
            tensor = torch.empty(shape, dtype=facts.dtype, device=self._context.device)
            work = self._context.channels.receive(message.peer, tensor)
            self._arrivals[message.microbatch, message.kind].append((message.peer, piece, tensor, work))

    def release(self) -> None:
        """Drops all tensors."""
        self._inputs = {}
        self._live.clear()
        self.outputs.clear()
        self.input_grads.clear()


def _last_backward(program: RankProgram) -> int | None:
    backwards = [action.microbatch for action in (*program.forward, *program.backward) if isinstance(action, Backward)]
    return backwards[-1] if backwards else None
