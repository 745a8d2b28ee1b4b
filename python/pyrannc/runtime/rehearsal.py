"""A step without messages, before the first one with them.

CUDA loads a kernel when it is launched first, and may wait for all that runs on the device before it does. A kernel
that receives runs until its peer sends. Two ranks that each load a kernel while they receive from one another would
wait for ever, so every kernel of a step is launched once while nothing is under way. Code that stays whole and decides
by what it computes may launch others later: after a rehearsal in which it waits for the device to know that, messages
go by way of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from pyrannc.core.program import Action, AllGather, Exchange, Message, RankProgram, ReduceScatter
from pyrannc.errors import first_line
from pyrannc.job import agree
from pyrannc.job.exchange import Work
from pyrannc.log import get_logger
from pyrannc.runtime.batch import Batch, OfBatch
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.exchanges import Exchanges
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.seat import Seat
from pyrannc.runtime.waits import waits_noted

_log = get_logger("RaNNCModule")


def is_needed(context: StageContext, program: RankProgram) -> bool:
    """True when a program's first step would load kernels while messages are under way."""
    actions = (*program.forward, *program.backward)
    return context.device.type == "cuda" and any(isinstance(action, Message | Exchange) for action in actions)


def rehearse_once(context: StageContext, program: RankProgram, inputs: OfBatch, weights: Weights) -> None:
    """Computes what a program does, with zeros for what other ranks would make; only kernels remain of it.

    All ranks of the program call it: they exchange inputs, since zeros need not be a batch, such as lengths of rows.

    Args:
        inputs: the rank's own.
        weights: of the outputs.
    """
    if id(program) in context.rehearsed:
        return
    doubts = _doubts_after(context, program, inputs, weights) if is_needed(context, program) else []
    if context.by_hosts is not None and (found := [doubt for own in agree.gather_objects(doubts) for doubt in own]):
        _log.info(
            "messages between ranks go by way of hosts: a step may load kernels that its rehearsal has not, since %s",
            found[0],
        )
        context.channels, context.exchanges = context.by_hosts.get()
        context.by_hosts = None
    context.rehearsed[id(program)] = program


def _doubts_after(context: StageContext, program: RankProgram, inputs: OfBatch, weights: Weights) -> list[str]:
    """Rehearses a program; why a step may load more kernels than that, as far as somebody has to know."""
    exchanges = _OfInputs(context.exchanges, context.device)
    buffers = {value: tensor.clone() for value, tensor in context.buffers.items()}
    alone = replace(context, channels=_NoChannels(context.device), exchanges=exchanges, buffers=buffers)
    batch = Batch(alone, program, inputs)
    for action in filter(_is_of_inputs, program.forward):
        batch.exchange(action, {}, {})
    batch.finish()
    exchanges.end()
    waits: list[str] = []
    try:
        with nullcontext(waits) if context.by_hosts is None else waits_noted(context.device) as waits:
            _rehearse(alone, program, batch, weights)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises for zeros; the step itself has no such
        _log.debug("the rehearsal of a step has ended early: %s", first_line(error))
        return ["that has ended early"]
    by_chance = ["it draws from Python or NumPy"] if context.seeds_others else []
    return [f"it waits for the device at {place}" for place in waits] + by_chance


def _rehearse(alone: StageContext, program: RankProgram, batch: Batch, weights: Weights) -> None:
    seat = Seat(alone, program, batch, None)
    current = alone.gradients.begin(alone.copies) if program.call != "forward" else None

    def seed(microbatch: int, value: int) -> Tensor | None:
        facts, (lo, hi) = alone.facts.values[value], program.rows[microbatch]
        if not facts.requires_grad:
            return None
        came_back = batch.output_grad(microbatch, value)
        if came_back is not None:
            return came_back
        return torch.zeros(facts.shape_at(hi - lo), dtype=facts.dtype, device=alone.device)

    executor = Executor(alone, seat, batch, None)
    batch.begin_backward(_zeros_of_outputs(alone, program))
    actions = [action for action in (*program.forward, *program.backward) if not _is_done_or_useless(action)]
    with nullcontext() if alone.code.watch is None else alone.code.watch.alone():
        executor.run(actions, current, seed, reduce=False)
    weights.totals(seat.outputs).finish()
    for pieces in batch.outputs(seat.outputs).values():
        pieces.joined()
    if current is not None:
        batch.input_grads(seat.input_grads)
    seat.release()


def _is_of_inputs(action: Action) -> TypeGuard[Exchange]:
    return isinstance(action, Exchange) and action.kind == "input"


def _is_done_or_useless(action: Action) -> bool:
    """True for what has been exchanged already, and for sums and gathers, of which nobody needs anything."""
    return _is_of_inputs(action) or isinstance(action, (ReduceScatter, AllGather))


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


class _OfInputs(Exchanges):
    """Exchanges of inputs; after their end with nobody."""

    def __init__(self, exchanges: Exchanges, device: torch.device) -> None:
        super().__init__(device)
        self._of_inputs: Exchanges | None = exchanges

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> list[Work]:
        """Fills what would be received later with zeros."""
        if self._of_inputs is not None:
            return self._of_inputs.start(sends, receives)
        for _, tensor in receives:
            tensor.zero_()
        return []

    def end(self) -> None:
        """Inputs have been exchanged."""
        self._of_inputs = None


class _Nothing:
    """Work that is done."""

    def wait(self) -> None:
        """Does not wait."""
