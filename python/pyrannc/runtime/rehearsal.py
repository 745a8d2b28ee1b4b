"""A step without messages, before the first one with them.

CUDA loads a kernel when it is launched first, and may wait for all that runs on the device before it does. A kernel
that receives runs until its peer sends. Two ranks that each load a kernel while they receive from one another would
wait for ever, so every kernel of a step is launched once while nothing is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from pyrannc.core.program import AllGather, Exchange, Message, RankProgram, ReduceScatter
from pyrannc.job.exchange import Work
from pyrannc.runtime.batch import Batch, OfBatch
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.exchanges import Exchanges
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.seat import Seat


def is_needed(context: StageContext, program: RankProgram) -> bool:
    """True when a program's first step would load kernels while messages are under way."""
    actions = (*program.forward, *program.backward)
    return context.device.type == "cuda" and any(isinstance(action, Message | Exchange) for action in actions)


def rehearse_once(context: StageContext, program: RankProgram, inputs: OfBatch, weights: Weights) -> None:
    """Computes what a program does, with zeros for what other ranks would send; only kernels remain of it.

    Args:
        inputs: the rank's own.
        weights: of the outputs.
    """
    if id(program) not in context.rehearsed and is_needed(context, program):
        _rehearse(context, program, inputs, weights)
        context.rehearsed.add(id(program))


def _rehearse(context: StageContext, program: RankProgram, inputs: OfBatch, weights: Weights) -> None:
    buffers = {value: tensor.clone() for value, tensor in context.buffers.items()}
    nobody, nothing = _NoChannels(context.device), _NoExchanges(context.device)
    alone = replace(context, channels=nobody, exchanges=nothing, buffers=buffers)
    batch = Batch(alone, program, inputs)
    seat = Seat(alone, program, batch, None)
    current = context.gradients.begin(context.copies) if program.call != "forward" else None

    def seed(microbatch: int, value: int) -> Tensor | None:
        facts, (lo, hi) = context.facts.values[value], program.rows[microbatch]
        if not facts.requires_grad:
            return None
        came_back = batch.output_grad(microbatch, value)
        if came_back is not None:
            return came_back
        return torch.zeros(facts.shape_at(hi - lo), dtype=facts.dtype, device=context.device)

    executor = Executor(alone, seat, batch, None)
    batch.begin_backward(_zeros_of_outputs(context, program))
    actions = [
        action for action in (*program.forward, *program.backward) if not isinstance(action, (ReduceScatter, AllGather))
    ]
    with nullcontext() if context.code.watch is None else context.code.watch.alone():
        executor.run(actions, current, seed, reduce=False)
    weights.totals(seat.outputs).finish()
    for pieces in batch.outputs(seat.outputs).values():
        pieces.joined()
    if current is not None:
        batch.input_grads(seat.input_grads)
    seat.release()


def _zeros_of_outputs(context: StageContext, program: RankProgram) -> dict[int, Tensor]:
    """In place of the gradients that come back for the rank's own outputs with rows."""
    if program.call != "halves" or not program.gather_inputs:
        return {}
    rows = sum(part.local[1] - part.local[0] for part in program.slices)
    parts = [part for part in context.parts.outputs if part.input is None and part.row_dim is not None]
    facts = {part.value: context.facts.values[part.value] for part in parts}
    return {
        value: torch.zeros(own.shape_at(rows), dtype=own.dtype, device=context.device)
        for value, own in facts.items()
        if own.requires_grad
    }


class _NoChannels(Channels):
    """Channels to nobody."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._nothing = _Nothing()

    def send(self, peer: int, tensors: Sequence[Tensor], *, microbatch: int, window: int | None) -> None:
        """Drops the tensors."""

    def receive(self, peer: int, into: Tensor) -> _Nothing:  # type: ignore[override]  # it is as good as a torch.distributed.Work
        """Fills the tensor with zeros."""
        into.zero_()
        return self._nothing


class _NoExchanges(Exchanges):
    """Exchanges with nobody."""

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Work]:
        """Fills what would be received with zeros."""
        del sends
        for _, tensor in receives:
            tensor.zero_()
        return []


class _Nothing:
    """Work that is done."""

    def wait(self) -> None:
        """Does not wait."""
