"""What all ranks tell each other at a call of the model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture import batch_rows, flatten, signature
from pyrannc.errors import InputError, MismatchError
from pyrannc.job import agree
from pyrannc.switches import switches

_NEW = -1
_FAILED = -2


@dataclass(frozen=True)
class AgreedCall:
    """A call that is the same on all ranks.

    Attributes:
        key: what it shares with others of the same captured form.
        tensors: of this rank's arguments.
        own_rows: of this rank's batch.
        rows: of each rank's batch, as far as they count.
    """

    key: Hashable
    tensors: list[Tensor]
    own_rows: int
    rows: tuple[int, ...]


def agree_on_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    number_of: Callable[[Hashable], int | None],
    device: torch.device,
    *,
    gather_inputs: bool,
) -> AgreedCall:
    """Finds out that all ranks make the same call, each with a batch of its own. All ranks call it.

    Args:
        number_of: the captured form with a key, by a number that is equal on all ranks; ``None`` for a new one.
        device: where this rank computes, and where its tensors must be.
        gather_inputs: the rows of all ranks count, instead of those of rank 0 alone.

    Raises:
        InputError: a tensor is on the wrong device, or the arguments have no batch.
        MismatchError: the ranks disagree.
    """
    failure: Exception | None = None
    key: Hashable = None
    tensors: list[Tensor] = []
    number, own_rows = _FAILED, 0
    try:
        tensors, _ = flatten((args, kwargs))
        own_rows = _check_inputs(tensors, device)
        key = signature(model, args, kwargs)
        known = number_of(key)
        number = _NEW if known is None else known
    except Exception as error:
        failure = error
    everyone = agree.gather_numbers((number, own_rows, _switched()))
    if any(found == _FAILED for found, _, _ in everyone):
        agree.raise_together(failure)
    rows = tuple(count if gather_inputs or rank == 0 else 0 for rank, (_, count, _) in enumerate(everyone))
    if len({(found, switched) for found, _, switched in everyone}) > 1:
        raise MismatchError(_different_calls(model, tensors))
    if sum(rows) == 0:
        raise InputError("the global batch has no rows: every rank's inputs are empty")
    return AgreedCall(key, tensors, own_rows, rows)


def _check_inputs(tensors: list[Tensor], device: torch.device) -> int:
    """The rows of this rank's batch."""
    try:
        rows = batch_rows(tensors)
    except ValueError as error:
        raise InputError(str(error)) from None
    for index, tensor in enumerate(tensors):
        if tensor.device != device:
            raise InputError(
                f"tensor {index} of the arguments (shape {tuple(tensor.shape)}) is on {tensor.device}, but this "
                f'rank computes on {device}; move it there: x.to("{device}")'
            )
    if torch.is_autocast_enabled(tensors[0].device.type):
        raise InputError("torch.autocast is not available yet; call the model outside it")
    return rows


def _switched() -> int:
    """What else must be the same on all ranks for a call, as one number."""
    return torch.is_grad_enabled() + 2 * switches().delay_grad_allreduce + 4 * switches().keep_graph


def _different_calls(model: nn.Module, tensors: list[Tensor]) -> str:
    mode = "training mode" if model.training else "evaluation mode"
    if not torch.is_grad_enabled():
        mode += " without gradients"
    shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
    described: list[str] = agree.gather_objects(f"{shapes}, in {mode}")
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(described)]
    return "the ranks call the model with arguments of different shapes or types, or in different modes:\n" + "\n".join(
        lines
    )
