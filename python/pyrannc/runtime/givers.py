"""Calls of wrapped models whose outputs lead to the inputs of another one.

A call takes gradients of the rank's local loss and gives them their weight in that of the global batch; the gradients
of its inputs have that weight already. Where inputs are another call's outputs, the weight must count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process


@dataclass(frozen=True)
class Giving:
    """A call whose outputs go on.

    Attributes:
        loss_inside: its loss is inside.
        gather_inputs: its batch is the rows of all ranks.
        weight: of this rank's local loss.
    """

    loss_inside: bool
    gather_inputs: bool
    weight: float


def giving_weights(inputs: Mapping[int, Tensor], program: RankProgram) -> dict[int, float]:
    """By input that another call has made, that call's weight of this rank's local loss. All ranks call it.

    Raises:
        RaNNCError: that call and this one cannot follow each other.
        MismatchError: the same, on another rank alone.
    """
    # Which inputs require gradients is equal on all ranks; where they come from may not be.
    led = {value: tensor for value, tensor in inputs.items() if tensor.requires_grad}
    if program.call == "forward" or not led:
        return {}
    return agree.together(lambda: _weights(led, program))


def _weights(inputs: Mapping[int, Tensor], program: RankProgram) -> dict[int, float]:
    found = {value: _givers(tensor.grad_fn) for value, tensor in inputs.items()}
    return {value: _weight(givers, program) for value, givers in found.items() if givers}


def _weight(givers: list[Giving], program: RankProgram) -> float:
    if any(giver.loss_inside for giver in givers):
        raise RaNNCError(
            "a wrapped model takes what was computed from the loss of another one, whose backward ran inside of its "
            "call; put both into one module and wrap that, or detach() the loss"
        )
    together = program.gather_inputs and all(giver.gather_inputs for giver in givers)
    if process.get_world_size() > 1 and not together:
        raise RaNNCError(
            "a wrapped model takes what another one returns, and gather_inputs is False for one of them; put both into "
            "one module and wrap that, or detach() what it takes"
        )
    weights = {giver.weight for giver in givers}
    if len(weights) > 1:
        raise RaNNCError(
            "a wrapped model takes what others return, which had different shares of the batch on this rank; put them "
            "into one module and wrap that"
        )
    return weights.pop()


def _givers(start: Any) -> list[Giving]:
    """The calls that an autograd graph leads back to, each path up to the first."""
    found: list[Giving] = []
    seen: set[Any] = set()
    stack = [start]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        call = getattr(node, "of_call", None)
        if call is not None:
            found.append(call.__self__.gives)
        else:
            stack += [before for before, _ in node.next_functions]
    return found
