"""What the inputs of a call were computed from: outputs of other wrapped models, parameters of the script.

A call takes gradients of the rank's local loss and gives them their weight in that of the global batch; the gradients
of its inputs have that weight already. Where inputs are another call's outputs, the weight must count once, as where
they were computed from parameters whose gradients the ranks average by the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pyrannc.core.graph import GraphFacts
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process

_LEAF = "torch::autograd::AccumulateGrad"


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


def giving_weights(
    inputs: Mapping[int, Tensor], facts: GraphFacts, program: RankProgram, own_weight: float, averaged: Set[int]
) -> dict[int, float]:
    """By input, the weight of this rank's local loss that what has made it gives gradients. All ranks call it.

    Args:
        own_weight: that of the call.
        averaged: ids of the tensors whose gradients the ranks average.

    Raises:
        RaNNCError: what has made it and this call cannot follow each other.
        MismatchError: the same, on another rank alone.
    """
    # Which inputs require gradients is equal on all ranks; where they come from may not be.
    led = {value: tensor for value, tensor in inputs.items() if tensor.requires_grad}
    if program.call == "forward" or not led:
        return {}
    return agree.together(lambda: _weights(led, facts, program, own_weight, averaged))


def _weights(
    inputs: Mapping[int, Tensor], facts: GraphFacts, program: RankProgram, own_weight: float, averaged: Set[int]
) -> dict[int, float]:
    found = {value: _Sources.of(tensor, averaged) for value, tensor in inputs.items()}
    weights = {value: _weight(sources.calls, program) for value, sources in found.items() if sources.calls}
    for value, sources in found.items():
        if value not in weights and sources.params:
            is_lost = not own_weight and facts.values[value].row_dim is None and process.get_rank() == 0
            _refuse_unweighted(sources, program, is_lost=is_lost)
            weights[value] = own_weight
    return weights


def _refuse_unweighted(sources: _Sources, program: RankProgram, *, is_lost: bool) -> None:
    if process.get_world_size() == 1 or not program.gather_inputs:
        return
    if sources.others:
        raise RaNNCError(
            "an input of the model was computed from parameters of the script and from another tensor that requires "
            "gradients: those of the parameters are averaged over ranks, those of the other are not, and both come by "
            "one way. Put the layers before the model into one module with it and wrap that, or detach() one of them"
        )
    if is_lost:
        raise RaNNCError(
            "rank 0 brings no rows, and an input of the model that has none was computed from parameters of the "
            "script: its gradient comes back on rank 0, where it counts by rows. Give it some, or put what computes "
            "the input into one module with the model and wrap that"
        )


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


@dataclass
class _Sources:
    """What an autograd graph leads back to, each path up to the first.

    Attributes:
        calls: of wrapped models.
        params: it leads to parameters.
        others: it leads to other leaves.
    """

    calls: list[Giving] = field(default_factory=list)
    params: bool = False
    others: bool = False

    @staticmethod
    def of(tensor: Tensor, averaged: Set[int]) -> _Sources:
        """Of what has made a tensor, which may be a leaf itself."""
        found, seen = _Sources(), set[Any]()
        stack: list[Any] = [tensor.grad_fn]
        if tensor.is_leaf:
            found._note(tensor, averaged)
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            call = getattr(node, "of_call", None)
            if call is not None:
                found.calls.append(call.__self__.gives)
            elif node.name() == _LEAF:
                found._note(node.variable, averaged)
            else:
                stack += [before for before, _ in node.next_functions]
        return found

    def _note(self, leaf: Tensor, averaged: Set[int]) -> None:
        if isinstance(leaf, nn.Parameter) or id(leaf) in averaged:
            self.params = True
        else:
            self.others = True
