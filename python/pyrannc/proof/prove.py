"""The comparison of one training call with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pyrannc.call.variant import Variant
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.log import get_logger
from pyrannc.proof.outcome import Outcome
from pyrannc.proof.reference import Batch, Reference
from pyrannc.proof.trial import Begin, run_on_all
from pyrannc.proof.verdict import Verdict, compare
from pyrannc.runtime.deployment import Deployment
from pyrannc.store.store import ParamStore

_log = get_logger("RaNNCModule")
_listeners: list[Callable[[Verdict], None]] = []


def listen(listener: Callable[[Verdict], None]) -> None:
    """Calls ``listener`` on every rank with the verdict of each proof to come."""
    _listeners.append(listener)


def prove(
    model: nn.Module,
    deployment: Deployment,
    variant: Variant,
    program: RankProgram,
    tensors: Sequence[Tensor],
    rows: tuple[int, ...],
    key: int,
    begin: Begin,
) -> Verdict:
    """Runs a training call under the Plan, and again in one process on rank 0. All ranks call it, and get the verdict.

    Parameters, buffers and random numbers are afterwards as they were; gradients are none.

    Args:
        model: the user's, whose parameters the ranks hold.
        program: of the call on this rank.
        tensors: of this rank's arguments.
        rows: of each rank's batch.
        key: what the call draws its random numbers from.
        begin: makes the call, given this rank's Stage.

    Raises:
        RaNNCError: parameters have gradients already, or what the ranks compute is not what one process does.
    """
    held = [name for name, param in deployment.store.local_params().items() if param.grad is not None]
    agree.together(lambda: _refuse_gradients(held))
    state = _whole_state(deployment.store)
    batch = Batch(_joined(variant, tensors), rows, key)
    here = run_on_all(deployment, variant, program, rows, begin)
    verdict = _of_first_rank(lambda: _judge(model, state, variant, deployment.device, batch, here))
    if process.get_rank() == 0 and not _listeners:
        _log.info("this call on all ranks beside one process:\n%s", verdict)
    for listener in _listeners:
        listener(verdict)
    if not verdict.equal:
        raise RaNNCError(f"what the ranks compute is not what one process computes:\n{verdict}")
    return verdict


def _refuse_gradients(held: Sequence[str]) -> None:
    if held:
        raise RaNNCError(f'"{held[0]}" has a gradient already: a proof needs the first call after zero_grad()')


def _judge(
    model: nn.Module,
    state: Mapping[str, Tensor],
    variant: Variant,
    device: torch.device,
    batch: Batch,
    here: Outcome,
) -> Verdict:
    expected = Reference(model, state, variant, device).run(batch)
    return compare(variant, here, expected)


def _of_first_rank(make: Callable[[], Verdict]) -> Verdict:
    """Rank 0's result, on all ranks."""
    made = agree.together(lambda: make() if process.get_rank() == 0 else None)
    verdict: Verdict = agree.broadcast_object(made)
    return verdict


def _whole_state(store: ParamStore) -> dict[str, Tensor]:
    """All parameters and buffers, on rank 0."""
    state = {}
    for name, tensor in store.tensors():
        full = store.on_first(name, tensor)
        if full is not None:
            state[name] = full
    return state


def _joined(variant: Variant, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The arguments with the rows of all ranks."""
    everyone: list[list[Tensor]] = agree.gather_objects([tensor.detach().cpu() for tensor in tensors])
    facts = variant.whole.facts
    found = []
    for place, value in enumerate(facts.inputs):
        row_dim = facts.values[value].row_dim
        given = [own[place] for own in everyone]
        found.append(given[0] if row_dim is None else torch.cat(given, row_dim.dim))
    return found
