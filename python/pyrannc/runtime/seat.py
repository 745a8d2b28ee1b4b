"""One Replica's microbatches in a step: their forwards, backwards, and messages.

A microbatch lives here from its forward to the end of its backward. Tensors that come from other ranks are leaves
of the Stage's autograd graph; their gradients go back where the tensors came from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pyrannc.blocks.split_backward import SplitBackward
from pyrannc.core.partition import InputPart
from pyrannc.core.program import Piece, RankProgram, Recv, Rows, Send
from pyrannc.job.exchange import Work, dense
from pyrannc.runtime.batch import Batch
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.prologue import Prologue
from pyrannc.runtime.rows import join_rows, take_rows
from pyrannc.runtime.timing import Kind, Marks

Seeds: TypeAlias = Callable[[int, int], Tensor | None]
"""The gradient of an output of a microbatch, by microbatch and Value."""


@dataclass
class _Microbatch:
    """A microbatch between its forward and its backward."""

    feeds: dict[int, Tensor]
    roots: dict[int, GradientEdge]
    """Where a backward can start, by Value."""
    results: dict[int, Tensor]
    """What is still to be sent; autograd keeps what it needs by itself."""
    unsent: int
    """Messages that take something of ``results``."""
    backward: SplitBackward | None = None
    """Between its two parts."""


_Arrivals = dict[tuple[int, str], list[tuple[int, Piece, Tensor, Work]]]


class Seat:
    """A Replica in one step.

    Args:
        context: the Stage.
        program: which rows it computes.
        batch: where the Stage's inputs come from.
        marks: where to note when computations run.
        lends: the working copies of a call with its criterion outside stay as they are until its backward.

    Attributes:
        outputs: of the model, made here, by microbatch and Value.
        input_grads: gradients of the Stage's inputs; of one without rows a sum over microbatches, under microbatch 0.
        reached: the Values through which gradients flow in the backwards; ``None`` for all.
    """

    def __init__(
        self,
        context: StageContext,
        program: RankProgram,
        batch: Batch,
        marks: Marks | None,
        *,
        lends: bool = True,
    ) -> None:
        self._context = context
        self._program = program
        self._batch = batch
        self._marks = marks
        self._part = context.parts.stages[context.stage]
        self._live: dict[int, _Microbatch] = {}
        self._arrivals: _Arrivals = defaultdict(list)
        self._input_parts = {part.value: part for part in self._part.inputs}
        self._trains = program.call != "forward"
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.input_grads: dict[tuple[int, int], Tensor] = {}
        self.reached: Set[int] | None = None
        self._params = dict(context.params)
        if program.call == "halves" and lends:
            # Parameters may change before the backward.
            with torch.enable_grad():
                lent = {value: context.gradients.working.lend(key) for value, key in context.copied.items()}
            self._params |= lent
        self._gradients: dict[int, Tensor] = {}
        once = frozenset() if context.prologue is None else context.prologue.changed
        alike = (context.facts.buffers_changed_alike & context.buffers.keys()) - once
        # Every microbatch finds the contents from before the call, and changes them to the same.
        several = len(program.rows) > 1
        self._before = {value: context.buffers[value].clone() if several else context.buffers[value] for value in alike}
        self._changed = False
        self._prologue: Prologue | None = None

    def _watched(self) -> AbstractContextManager[None]:
        watch = self._context.code.watch
        return nullcontext() if watch is None else watch.backward()

    def _timed(self, kind: Kind, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._marks is None else self._marks.span(kind, microbatch)

    def has_rows(self, microbatch: int) -> bool:
        """True when this Replica computes something of a microbatch."""
        return self._rows_in(microbatch) > 0

    def _rows_in(self, microbatch: int) -> int:
        lo, hi = self._program.rows[microbatch]
        return hi - lo

    def forward(self, microbatch: int) -> None:
        """Computes a microbatch from its inputs and what has arrived for it."""
        context = self._context
        feeds = {part.value: self._input(part, microbatch) for part in self._part.inputs}
        for value in self._part.receives:
            feeds[value] = self._arrived_value(value, microbatch)
        self._arrivals.pop((microbatch, "value"), None)
        before = {value: tensor.clone() for value, tensor in self._before.items()}
        with self._timed("forward", microbatch):
            with torch.set_grad_enabled(self._trains):
                tensors = {**self._params, **context.buffers, **self._once(), **before, **feeds}
                context.randomness.at(self._program.global_rows[microbatch])
                results = context.code(self._rows_in(microbatch), tensors)
            self._store_updates(results, before)
        for value in self._part.outputs:
            self.outputs[microbatch, value] = self._batch.kept(results[value].detach())
        self._keep(microbatch, feeds, results)

    def _once(self) -> Mapping[int, Tensor]:
        """What is computed once a step, by the first microbatch that comes."""
        code = self._context.prologue
        if code is None:
            return {}
        if self._prologue is None:
            self._context.randomness.at(())
            made, seen = code.run(self._params, self._context.buffers)
            self._prologue = Prologue(made, seen, trains=self._trains)
        return self._prologue.tensors

    def _keep(self, microbatch: int, feeds: dict[int, Tensor], results: Mapping[int, Tensor]) -> None:
        """Keeps of a forward what messages and its backward need."""
        unsent = self._program.value_messages.get(microbatch, 0)
        if self._trains or unsent:
            ends = dict.fromkeys([*self._part.outputs, *self._part.sends]) if self._trains else {}
            self._live[microbatch] = _Microbatch(
                feeds={value: feed for value, feed in feeds.items() if feed.requires_grad},
                roots={value: get_gradient_edge(results[value]) for value in ends if results[value].requires_grad},
                results={value: results[value].detach() for value in self._part.sends} if unsent else {},
                unsent=unsent,
            )

    @torch.no_grad()
    def _store_updates(self, results: Mapping[int, Tensor], changed: Mapping[int, Tensor]) -> None:
        """Gives buffers their new contents; ``changed``: those that change once a call, as the microbatch left them."""
        new = {**changed, **{buffer: results[update] for buffer, update in self._context.code.updates.items()}}
        for buffer, contents in new.items():
            if buffer not in changed or not self._changed:
                self._context.buffers[buffer].copy_(contents)
        self._changed = True

    def _input(self, part: InputPart, microbatch: int) -> Tensor:
        tensor = self._batch.input(microbatch, part.value).detach()
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

    def pass_by(self, *, backward: bool) -> None:
        """Takes part in what the other Replicas gather for a microbatch of which this one has no rows."""
        if self._context.code.watch is not None:
            self._context.code.watch.pass_by(backward=backward)

    def backward(self, microbatch: int, seeds: Seeds, *, keep_graph: bool, last: bool) -> None:
        """Computes a microbatch's gradients, from those of its outputs and those that have arrived.

        Args:
            keep_graph: leave the autograd graph alive.
            last: the step's last one, after which the gradients of what is computed once are complete.
        """
        live = self._live[microbatch] if keep_graph else self._live.pop(microbatch)
        roots, grads = self._starts(microbatch, live, seeds)
        with self._timed("backward", microbatch):
            with self._watched():
                if roots:
                    torch.autograd.backward(roots, grads, retain_graph=keep_graph)
            self._collect_gradients(microbatch, live)
            self._collect_once(keep_graph=keep_graph, last=last)

    def backward_input(self, microbatch: int, seeds: Seeds, *, keep_graph: bool) -> None:
        """The first part of :meth:`backward`: computes the gradients of what came in; all where it cannot be parted."""
        live = self._live[microbatch]
        roots, grads = self._starts(microbatch, live, seeds)
        with self._timed("backward", microbatch):
            if not self._context.code.keeps_whole:
                live.backward = SplitBackward(roots, grads, list(live.feeds.values()))
                live.backward.run_inputs()
            elif roots:
                torch.autograd.backward(roots, grads, retain_graph=keep_graph)
            self._collect_gradients(microbatch, live)
            self._collect_once(keep_graph=True, last=False)

    def backward_weight(self, microbatch: int, *, keep_graph: bool, last: bool) -> None:
        """The second part of :meth:`backward`: computes the gradients of parameters."""
        live = self._live[microbatch] if keep_graph else self._live.pop(microbatch)
        backward, live.backward = live.backward, None
        with self._timed("backward", microbatch):
            if backward is not None:
                backward.run_weights(keep_graph=keep_graph)
            self._collect_once(keep_graph=keep_graph, last=last)

    def _starts(self, microbatch: int, live: _Microbatch, seeds: Seeds) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where a backward starts, and with which gradients."""
        roots, grads = [], []
        for value in self._part.outputs:
            seed = seeds(microbatch, value)
            if seed is not None and value in live.roots:
                roots.append(live.roots[value])
                grads.append(seed)
        for value in self._part.sends:
            if self._context.parts.crossings[value].requires_grad:
                grad = self._arrived_gradient(value, microbatch)
                if value in live.roots and (self.reached is None or value in self.reached):
                    roots.append(live.roots[value])
                    grads.append(grad)
        for peer in {peer for peer, *_ in self._arrivals.pop((microbatch, "grad"), ())}:
            # Who has sent gradients has had the Values.
            self._context.channels.let_go(peer, microbatch)
        return roots, grads

    def _collect_once(self, *, keep_graph: bool, last: bool) -> None:
        """Takes the gradients of what is computed once a step."""
        if self._prologue is not None:
            self._prologue.collect()
            if last:
                self._prologue.backward(keep_graph=keep_graph)

    def _collect_gradients(self, microbatch: int, live: _Microbatch) -> None:
        """Takes the gradients of what came in off the leaves."""
        gradients = {}
        for value, feed in live.feeds.items():
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

    def send(self, message: Send) -> None:
        """Starts to send what the last computation of the message's microbatch made."""
        first = self._program.rows[message.microbatch][0]
        if message.kind == "value":
            source, window = self._live[message.microbatch].results, self._program.value_window
        else:
            source, window = self._gradients, self._program.grad_window
        tensors = []
        for piece in message.pieces:
            row_dim = self._context.parts.crossings[piece.value].row_dim
            rows = (piece.rows[0] - first, piece.rows[1] - first)
            tensors.append(dense(take_rows(source[piece.value], row_dim, rows)))
        self._context.channels.send(message.peer, tensors, microbatch=message.microbatch, window=window)
        if message.kind == "value":
            self._let_go_of_sent(message.microbatch)

    def _let_go_of_sent(self, microbatch: int) -> None:
        """After a message: what has gone out for the last time is not kept any longer."""
        live = self._live[microbatch]
        live.unsent -= 1
        if not live.unsent:
            live.results = {}
            if not self._trains:
                del self._live[microbatch]

    def receive(self, message: Recv) -> None:
        """Starts to receive; the computation of the message's microbatch waits for it."""
        for piece in message.pieces:
            facts = self._context.facts.values[piece.value]
            shape = facts.shape_at(piece.rows[1] - piece.rows[0])
            tensor = torch.empty(shape, dtype=facts.dtype, device=self._context.device)
            work = self._context.channels.receive(message.peer, tensor)
            self._arrivals[message.microbatch, message.kind].append((message.peer, piece, tensor, work))

    def release(self) -> None:
        """Drops all tensors."""
        self._params = {}
        self._live.clear()
        self._prologue = None
        self.outputs.clear()
        self.input_grads.clear()
