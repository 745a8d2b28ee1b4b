"""A step without messages, before the first one with them.

CUDA loads a kernel when it is launched first, and may wait for all that runs on the device before it does. A kernel
that receives runs until its peer sends. Two ranks that each load a kernel while they receive from one another would
wait for ever, so every kernel of a step is launched once while nothing is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from pyrannc.core.program import AllGather, Message, RankProgram, ReduceScatter
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.executor import Executor
from pyrannc.runtime.loss import Weights
from pyrannc.runtime.seat import Seat


def is_needed(context: StageContext, program: RankProgram) -> bool:
    """True when a program's first step would load kernels while messages are under way."""
    actions = (*program.forward, *program.backward)
    return context.device.type == "cuda" and any(isinstance(action, Message) for action in actions)


def rehearse_once(
    context: StageContext, program: RankProgram, inputs: Mapping[tuple[int, int], Tensor], weights: Weights
) -> None:
    """Computes what a program does, with zeros for what other ranks would send; only kernels remain of it.

    Args:
        inputs: the Stage's inputs by microbatch and Value.
        weights: of the outputs.
    """
    if id(program) not in context.rehearsed and is_needed(context, program):
        _rehearse(context, program, inputs, weights)
        context.rehearsed.add(id(program))


def _rehearse(
    context: StageContext, program: RankProgram, inputs: Mapping[tuple[int, int], Tensor], weights: Weights
) -> None:
    buffers = {value: tensor.clone() for value, tensor in context.buffers.items()}
    alone = replace(context, channels=_NoChannels(context.device), buffers=buffers)
    seat = Seat(alone, program, inputs, None)
    current = context.gradients.begin(context.copies) if program.call != "forward" else None

    def seed(microbatch: int, value: int) -> Tensor | None:
        facts, (lo, hi) = context.facts.values[value], program.rows[microbatch]
        if not facts.requires_grad:
            return None
        return torch.zeros(facts.shape_at(hi - lo), dtype=facts.dtype, device=context.device)

    executor = Executor(alone, seat, None)
    actions = [
        action for action in (*program.forward, *program.backward) if not isinstance(action, (ReduceScatter, AllGather))
    ]
    with nullcontext() if context.code.watch is None else context.code.watch.alone():
        executor.run(actions, current, seed, reduce=False)
    weights.totals(seat.outputs).finish()
    seat.release()


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


class _Nothing:
    """Work that is done."""

    def wait(self) -> None:
        """Does not wait."""
