"""The tail of a captured call: what runs once a step on all rows of the global batch, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.call.variant import Whole
from pyrannc.call.whole_batch import BatchRows
from pyrannc.core.partition import RowDim, StagePart
from pyrannc.core.tail import Joined, TailPart
from pyrannc.runtime.join import Joiner
from pyrannc.runtime.rows import take_rows


class TailCode:
    """A tail that can be run.

    Args:
        whole: the captured call.
        part: what belongs to the tail.
        param: the leaf of a parameter, by its first name.
        buffer: a buffer, by its name.
        device: this rank's.
        randomness: as for Stages.

    Attributes:
        params: leaves by Value.
        seeds_generator: True when some Op draws from the device's generator.
        seeds_others: True when some Op draws from those of Python and NumPy, too.
    """

    def __init__(
        self,
        whole: Whole,
        part: TailPart,
        param: Callable[[str], Tensor],
        buffer: Callable[[str], Tensor],
        device: torch.device,
        randomness: Randomness,
    ) -> None:
        facts = whole.facts
        self.part = part
        self.values = facts.values
        self.inputs = frozenset(facts.inputs)
        self._randomness = randomness
        self._changes = any(facts.ops[op].mutates for op in (*part.ops, *part.known_ops))
        self.params = {facts.params[i].value: param(facts.params[i].names[0]) for i in part.params}
        self.names = {facts.params[i].value: facts.params[i].names[0] for i in part.params}
        self._buffers = {facts.buffers[i].value: buffer(facts.buffers[i].name) for i in part.buffers}
        self._constants = {facts.constants[i]: whole.captured.constants[i].to(device) for i in part.constants}
        joined = [item.value for item in part.joined]
        self._code = StageCode(
            whole.captured, facts, _stage_part(part, part.ops, joined, part.outputs), device, randomness
        )
        made = {value for op in part.known_ops for value in facts.ops[op].results}
        self.known = [item for item in part.joined if item.known and item.value in made]
        read = {value for op in part.known_ops for value in facts.ops[op].operands}
        self.known_inputs = sorted(read & self.inputs)
        known = _stage_part(part, part.known_ops, self.known_inputs, [item.value for item in self.known], params=False)
        self._known_code = StageCode(whole.captured, facts, known, device, randomness)
        self.seeds_generator, self.seeds_others = self._code.seeds_generator, self._code.seeds_others

    def run(self, rows: int, joined: Mapping[int, Tensor], *, store: bool) -> dict[int, Tensor]:
        """Runs the tail; ``store``: buffers get their new contents, otherwise they are left as they are."""
        self._randomness.at([(0, rows)])
        buffers: Mapping[int, Tensor] = self._buffers
        if self._changes:
            joined = {value: tensor.clone() for value, tensor in joined.items()}
            buffers = buffers if store else {value: tensor.clone() for value, tensor in buffers.items()}
        results = self._code(rows, {**self.params, **buffers, **self._constants, **joined})
        if store:
            with torch.no_grad():
                for buffer, update in self._code.updates.items():
                    self._buffers[buffer].copy_(results[update])
        return {value: results[value] for value in self.part.outputs}

    @torch.no_grad()
    def run_known(self, rows: int, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The Values that are known before the step, as ``rows`` rows of the inputs make them."""
        results = self._known_code(rows, {**self._buffers, **self._constants, **inputs})
        return {item.value: results[item.value] for item in self.known}


def _stage_part(
    part: TailPart,
    ops: tuple[int, ...],
    receives: list[int],
    outputs: tuple[int, ...] | list[int],
    *,
    params: bool = True,
) -> StagePart:
    return StagePart(
        ops=tuple(ops),
        inputs=(),
        receives=tuple(receives),
        sends=(),
        outputs=tuple(outputs),
        params=part.params if params else (),
        buffers=part.buffers,
        constants=part.constants,
        mutated_buffers=(),
    )


@dataclass(frozen=True)
class TailGradients:
    """What the backward of a tail gives: gradients of joined Values and of parameters, both by Value."""

    joined: dict[int, Tensor]
    params: dict[int, Tensor | None]


class TailStep:
    """The tail in one step.

    Args:
        code: the tail.
        rows: of the global batch.
        joiner: of parts of this batch.
        inputs: of this rank, by Value.
        device: this rank's.

    All ranks make it and call its methods together.
    """

    def __init__(
        self, code: TailCode, rows: BatchRows, joiner: Joiner, inputs: Mapping[int, Tensor], device: torch.device
    ) -> None:
        self._code = code
        self._rows = rows
        self._joiner = joiner
        self._device = device
        self._inputs = inputs
        self._known = self._join_known()
        self._leaves: dict[int, Tensor] = {}
        self._results: dict[int, Tensor] = {}

    def _join_known(self) -> dict[int, Tensor]:
        """Inputs that the tail takes, and what is known from inputs alone."""
        code, joiner = self._code, self._joiner
        wanted = {item.value for item in code.part.joined if item.value in code.inputs}
        found = {}
        own = {value: self._inputs[value].detach() for value in {*wanted, *code.known_inputs}}
        for value in sorted(own):
            if code.values[value].rows_by_shape is None:
                own[value] = joiner.of_first(own[value])
        for value in sorted(wanted):
            row_dim = code.values[value].rows_by_shape
            found[value] = own[value] if row_dim is None else self._joined_input(own[value], value, row_dim)
        if code.known:
            made = code.run_known(self._rows.own_count, own) if self._rows.own_count else None
            found.update(self._joined_known(made))
        return found

    def _joined_input(self, tensor: Tensor, value: int, row_dim: RowDim) -> Tensor:
        shape = self._code.values[value].shape_at(self._rows.total)
        return (
            self._joiner.rows(tensor, row_dim, shape) if self._rows.gathered else self._joiner.of_first(tensor, shape)
        )

    def _joined_known(self, made: Mapping[int, Tensor] | None) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        reductions: list[tuple[Joined, Tensor | None]] = []
        for item in self._code.known:
            facts = self._code.values[item.value]
            tensor = None if made is None else made[item.value]
            if not self._rows.gathered:
                given = tensor if tensor is not None else torch.zeros(0, dtype=facts.dtype, device=self._device)
                found[item.value] = self._joiner.of_first(given.contiguous(), facts.shape_at(self._rows.total))
            elif isinstance(item.join, RowDim):
                given = torch.empty(facts.shape_at(0), dtype=facts.dtype, device=self._device)
                given = given if tensor is None else tensor
                found[item.value] = self._joiner.rows(given, item.join, facts.shape_at(self._rows.total))
            else:
                reductions.append((item, tensor))
        totals = {item.value: self._code.values[item.value] for item, _ in reductions}
        parts = [
            (item.value, tensor, 1.0 if item.join == "sum" else self._rows.own_share)
            for item, tensor in reductions
            if tensor is not None
        ]
        found.update(self._joiner.reductions(totals, parts))
        return found

    def gradients_of(self, loss: int) -> dict[int, Tensor]:
        """The gradients of the loss by joined Values, where they depend on known Values alone."""
        code = self._code
        if loss not in code.part.outputs:
            return {}
        joined = dict(self._known)
        for item in code.part.joined:
            if item.value not in joined:
                facts = code.values[item.value]
                joined[item.value] = torch.zeros(
                    facts.shape_at(self._rows.total), dtype=facts.dtype, device=self._device
                )
        leaves = self._as_leaves(joined)
        targets = {value: leaf for value, leaf in leaves.items() if leaf.requires_grad}
        with torch.enable_grad():
            result = code.run(self._rows.total, leaves, store=False)[loss]
        grads = torch.autograd.grad([result], list(targets.values()), allow_unused=True)
        return {value: grad for value, grad in zip(targets, grads, strict=True) if grad is not None}

    def _as_leaves(self, joined: Mapping[int, Tensor]) -> dict[int, Tensor]:
        wanted = {item.value for item in self._code.part.joined if item.requires_grad}
        return {
            value: tensor.detach().requires_grad_(value in wanted and tensor.is_floating_point())
            for value, tensor in joined.items()
        }

    def run(self, body: Mapping[int, Tensor], *, trains: bool) -> dict[int, Tensor]:
        """The outputs that the tail makes: this rank's rows, and in full what has not one dimension of rows.

        Args:
            body: what the body made: this rank's rows, and reductions of the global batch.
            trains: :meth:`backward` will be called.
        """
        code = self._code
        joined = dict(self._known)
        for item in code.part.joined:
            if item.value not in joined:
                tensor = body[item.value]
                if isinstance(item.join, RowDim) and self._rows.gathered:
                    shape = code.values[item.value].shape_at(self._rows.total)
                    tensor = self._joiner.rows(tensor, item.join, shape)
                joined[item.value] = tensor
        leaves = self._as_leaves(joined)
        with torch.set_grad_enabled(trains):
            made = code.run(self._rows.total, leaves, store=True)
            results = {value: self._own_rows(value, tensor) for value, tensor in made.items()}
        if trains:
            self._leaves, self._results = leaves, results
        return {value: tensor.detach() for value, tensor in results.items()}

    def _own_rows(self, value: int, tensor: Tensor) -> Tensor:
        row_dim = self._code.values[value].rows_by_shape
        return tensor if row_dim is None else take_rows(tensor, row_dim, self._rows.own)

    def backward(self, grads: Mapping[int, Tensor | None], *, keep_graph: bool) -> TailGradients:
        """This rank's gradients, given those of the tail's outputs; of what has joined, zeros where none came."""
        joined = {value: leaf for value, leaf in self._leaves.items() if leaf.requires_grad}
        params = {value: leaf for value, leaf in self._code.params.items() if leaf.requires_grad}
        pairs = [(self._results[value], grads.get(value)) for value in self._code.part.outputs]
        roots = [(root, grad) for root, grad in pairs if grad is not None and root.requires_grad]
        targets = [*joined.values(), *params.values()]
        found: tuple[Tensor | None, ...] = (None,) * len(targets)
        if roots and targets:
            found = torch.autograd.grad(
                [root for root, _ in roots],
                targets,
                [grad for _, grad in roots],
                retain_graph=keep_graph,
                allow_unused=True,
            )
        if not keep_graph:
            self._leaves, self._results = {}, {}
        own = zip(joined.items(), found, strict=False)
        return TailGradients(
            joined={value: torch.zeros_like(leaf) if grad is None else grad for (value, leaf), grad in own},
            params=dict(zip(params, found[len(joined) :], strict=True)),
        )

    def release(self) -> None:
        """Drops all tensors."""
        self._inputs, self._known, self._leaves, self._results = {}, {}, {}, {}

    def own_rows_of_sum(self, grad: Tensor, row_dim: RowDim) -> Tensor:
        """This rank's rows of a gradient of all rows, summed over the ranks' losses."""
        return take_rows(self._joiner.summed(grad), row_dim, self._rows.own)
