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
from torch.autograd.graph import get_gradient_edge

from pyrannc.capture.torch_internals.gradients import leaf_runs_in_backward
from pyrannc.core.graph import GraphFacts
from pyrannc.core.program import RankProgram
from pyrannc.errors import RaNNCError
from pyrannc.job import agree, process
from pyrannc.store.in_ddp import in_ddp, note_leading, refuse_fsdp

_LEAF, _CHECKPOINT = "torch::autograd::AccumulateGrad", "CheckpointFunctionBackward"


@dataclass(frozen=True)
class Leaves:
    """Tensors that inputs may have been computed from, by id.

    Attributes:
        averaged: whose gradients the ranks average by their shares of the batch.
        own: the model's own parameters.
    """

    averaged: Set[int] = frozenset()
    own: Set[int] = frozenset()


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


def sources(
    inputs: Mapping[int, Tensor], facts: GraphFacts, program: RankProgram, own_weight: float, leaves: Leaves
) -> dict[int, Source]:
    """What has made the inputs that require gradients. All ranks call it.

    Args:
        own_weight: of this rank's local loss in this call.

    Raises:
        RaNNCError: what has made one and this call cannot follow each other.
        MismatchError: the same, on another rank alone.
    """
    # Which inputs require gradients is equal on all ranks; where they come from may not be.
    led = {value: tensor for value, tensor in inputs.items() if tensor.requires_grad}
    if program.call == "forward" or not led:
        return {}
    is_divided = program.gather_inputs and process.get_world_size() > 1

    def found() -> dict[int, Source]:
        made = {value: Source(own_weight, is_divided, facts.values[value].row_dim is None) for value in led}
        for value, source in made.items():
            source.follow(led[value])
        params = [leaf for source in made.values() for leaf in source.params()]
        by_ddp = set[int]()
        if params and process.get_world_size() > 1:
            refuse_fsdp(params)
            by_ddp = in_ddp(params)
        for source in made.values():
            source.sort(leaves, by_ddp)
            source.settle(program)
        return made

    return agree.together(found)


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
class Source:
    """What an autograd graph leads back to from an input, each path up to the first.

    Attributes:
        own_weight: of this rank's local loss in the call that takes the input.
        is_divided: each rank brings rows of its own.
        without_rows: the input is the same for all rows.
        weight: of this rank's local loss in the calls that have made it; 0 without such calls.
    """

    own_weight: float
    is_divided: bool
    without_rows: bool
    weight: float = 0.0
    _calls: list[Giving] = field(default_factory=list)
    _leaves: list[Any] = field(default_factory=list)
    _averaged: list[Any] = field(default_factory=list)
    _own: list[Any] = field(default_factory=list)
    _by_ddp: list[Any] = field(default_factory=list)
    _others: list[Any] = field(default_factory=list)

    def follow(self, tensor: Tensor) -> None:
        """Finds them."""
        seen = set[Any]()
        stack: list[Any] = [get_gradient_edge(tensor).node]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            call = getattr(node, "of_call", None)
            if call is not None:
                self._calls.append(call.__self__.gives)
            elif node.name() == _LEAF:
                self._leaves.append(node)
            elif node.name() == _CHECKPOINT and process.get_world_size() > 1:
                raise RaNNCError(
                    "an input of the model was computed by torch.utils.checkpoint with use_reentrant=True, which hides "
                    "from what: use_reentrant=False shows it"
                )
            else:
                stack += [before for before, _ in node.next_functions]

    def params(self) -> list[Tensor]:
        """The parameters of modules among what was found."""
        return [node.variable for node in self._leaves if isinstance(node.variable, nn.Parameter)]

    def sort(self, leaves: Leaves, by_ddp: Set[int]) -> None:
        """Tells the leaves apart, given the ids of those whose gradients the script averages."""
        for node in self._leaves:
            leaf = id(node.variable)
            if leaf in leaves.own:
                self._own.append(node)
            elif leaf in by_ddp:
                self._by_ddp.append(node)
            else:
                (self._averaged if leaf in leaves.averaged else self._others).append(node)

    def settle(self, program: RankProgram) -> None:
        """Finds the weight of the calls among them."""
        if not self._calls:
            return
        self.weight = _weight(self._calls, program)
        if self._averaged and self.is_divided and self.weight != self.own_weight:
            raise RaNNCError(
                "an input of the model was computed from parameters of the script, and from what another wrapped model "
                "returns, which had another share of the batch on this rank; put them into one module and wrap that"
            )

    def gradient_of_local_loss(self, grad: Tensor) -> Tensor:
        """Given the gradient of an input, that which its makers take. Called inside of a backward."""
        weighted, by_ddp = bool(self._calls) or _run(self._averaged), _run(self._by_ddp)
        self._refuse_several(weighted, by_ddp)
        if by_ddp:
            note_leading(node.variable for node in self._by_ddp)
            # Of which the ranks take the mean, where the sum is the global batch's.
            return grad * process.get_world_size()
        if not self.is_divided:
            return grad / self.weight if self.weight else grad
        if not weighted:
            return grad
        weight = self.weight or self.own_weight
        if not weight and self.without_rows and process.get_rank() == 0:
            raise RaNNCError(
                "rank 0 brings no rows, and an input of the model that has none was computed from parameters of the "
                "script: its gradient comes back on rank 0, where it counts by rows. Give it some, or put what "
                "computes the input into one module with the model and wrap that"
            )
        return grad / weight if weight else grad

    def _refuse_several(self, weighted: bool, by_ddp: bool) -> None:
        """Raises where makers take gradients of different weights in this backward."""
        if self.is_divided and _run(self._own):
            raise RaNNCError(
                "an input of the model was computed with a parameter of the same model outside of its forward, and "
                "ranks have no sum of what it gets there: compute that inside of the forward, or detach() it"
            )
        others = _run(self._others)
        if (weighted + others > 1 and self.is_divided) or (by_ddp and (weighted or others)):
            raise RaNNCError(
                "an input of the model was computed from what ranks give a weight, such as parameters in its optimizer "
                "or in DistributedDataParallel, or what another wrapped model returns, and from another tensor that "
                "requires gradients, which has none or another one, and both get theirs in one backward: put what "
                "computes the input into one module with the model and wrap that, or detach() one of them"
            )


def _run(leaves: list[Any]) -> bool:
    """Inside of a backward: true when the leaf of one of these nodes gets a gradient."""
    return any(map(leaf_runs_in_backward, leaves))
