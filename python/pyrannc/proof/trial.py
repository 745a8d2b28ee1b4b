"""The call on all ranks, under the deployed Plan; parameters, buffers and gradients are as before afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from pyrannc.blocks.function import StageCode
from pyrannc.call.variant import Variant
from pyrannc.core.program import RankProgram, Rows
from pyrannc.job import agree, process
from pyrannc.proof.outcome import Outcome, seeds
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.deployment import Deployment
from pyrannc.runtime.rows import take_rows
from pyrannc.runtime.step import Step

Begin = Callable[[StageContext], Step]


class _Watched:
    """A Stage's code whose results are kept."""

    def __init__(self, code: StageCode) -> None:
        self._code = code
        self.made: list[dict[int, Tensor]] = []
        self.updates, self.watch = code.updates, code.watch
        self.seeds_generator, self.seeds_others = code.seeds_generator, code.seeds_others

    def __call__(self, rows: int, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        made = self._code(rows, tensors)
        self.made.append({value: tensor.detach().cpu() for value, tensor in made.items()})
        return made


def run_on_all(
    deployment: Deployment, variant: Variant, program: RankProgram, rows: tuple[int, ...], begin: Begin
) -> Outcome:
    """Forward and backward. All ranks call it, and get the outcome.

    Args:
        begin: makes the call, given this rank's Stage.
    """
    store, context = deployment.store, deployment.context(variant, program)
    code = _Watched(context.code)
    before = {name: buffer.clone() for name, buffer in store.local_buffers().items()}
    step = begin(replace(context, code=cast(StageCode, code)))
    outputs = dict(zip(variant.whole.facts.outputs, step.results(), strict=True))
    roots = _own_seeds(variant, outputs, rows)
    torch.autograd.backward([root for root, _ in roots], [seed for _, seed in roots])
    own_values = _own_values(variant, context, program, code.made)
    outcome = Outcome(
        values=_joined_values(variant, sum(rows), agree.gather_objects(own_values)),
        outputs=_joined_outputs(variant, agree.gather_objects({v: t.detach().cpu() for v, t in outputs.items()})),
        buffers={name: store.full(name, store.buffers[name]) for name in _names(variant)},
    )
    trained = [param.names[0] for param in variant.whole.facts.params if store.params[param.names[0]].requires_grad]
    outcome.gradients = {name: store.full_grad(name, store.params[name]) for name in trained}
    for name, buffer in store.local_buffers().items():
        buffer.copy_(before[name])
    for param in store.params.values():
        param.grad = None
    return outcome


def _names(variant: Variant) -> list[str]:
    return [buffer.name for buffer in variant.whole.facts.buffers]


def _own_seeds(variant: Variant, outputs: Mapping[int, Tensor], rows: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    rank = process.get_rank()
    own = sum(rows[:rank]), sum(rows[: rank + 1])
    found = []
    for value, seed in seeds(variant, sum(rows)).items():
        row_dim = variant.whole.facts.values[value].rows_of_output
        part = seed if row_dim is None else take_rows(seed, row_dim, own)
        found.append((outputs[value], part.to(outputs[value].device)))
    return found


_Runs = Sequence[Rows]


def _own_values(
    variant: Variant, context: StageContext, program: RankProgram, made: Sequence[Mapping[int, Tensor]]
) -> list[tuple[int, _Runs, Tensor]]:
    """What this rank's Stage gives to others: the Value, rows of the global batch, and the tensor."""
    sends = variant.parts.stages[context.stage].sends
    return [
        (value, runs, results[value])
        for runs, results in zip([runs for runs in program.global_rows if runs], made, strict=True)
        for value in sends
    ]


def _joined_values(
    variant: Variant, total: int, found: Sequence[Sequence[tuple[int, _Runs, Tensor]]]
) -> dict[int, Tensor]:
    joined: dict[int, Tensor] = {}
    for value, runs, tensor in (item for own in found for item in own):
        facts, row_dim = variant.facts.values[value], variant.parts.crossings[value].row_dim
        whole = joined.setdefault(value, torch.zeros(facts.shape_at(total), dtype=tensor.dtype, device="cpu"))
        start = 0
        for lo, hi in runs:
            take_rows(whole, row_dim, (lo, hi)).copy_(take_rows(tensor, row_dim, (start, start + hi - lo)))
            start += hi - lo
    return joined


def _joined_outputs(variant: Variant, found: Sequence[dict[int, Tensor]]) -> dict[int, Tensor]:
    facts = variant.whole.facts
    joined: dict[int, Any] = {}
    for value in dict.fromkeys(facts.outputs):
        if value in facts.inputs:
            continue
        row_dim = facts.values[value].rows_of_output
        joined[value] = found[0][value] if row_dim is None else torch.cat([own[value] for own in found], row_dim.dim)
    return joined
