"""The call in one process: the user's own module on the global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.call.variant import Variant
from pyrannc.capture.nodes.autocast import no_autocast
from pyrannc.capture.reads.handed_back import as_given
from pyrannc.capture.trace.attributes import AttributeLog
from pyrannc.capture.user.row_lists import unpacked
from pyrannc.capture.user.source import SourceTracker
from pyrannc.core.partition import StagePart
from pyrannc.proof.outcome import Outcome, seeds


@dataclass(frozen=True)
class Batch:
    """The global batch, on the host.

    Attributes:
        tensors: of the arguments, with the rows of all ranks.
        rows: of each rank.
        key: what the call draws its random numbers from.
    """

    tensors: Sequence[Tensor]
    rows: tuple[int, ...]
    key: int

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.rows)


class Reference:
    """One process that computes a captured call.

    Where the call draws random numbers, which torch would draw in another order, it is the captured Graph that runs,
    uncut and on all rows; otherwise the module itself.

    Args:
        model: the user's model.
        state: its parameters and buffers by first name, all of them.
        device: where to compute; where that has not enough memory, the host does it.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor], variant: Variant, device: torch.device) -> None:
        self._model = model
        self._state = state
        self._variant = variant
        self._device = device

    def run(self, batch: Batch) -> Outcome:
        """Forward and backward."""
        try:
            return self._run(batch, self._device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._run(batch, torch.device("cpu"))

    def _run(self, batch: Batch, device: torch.device) -> Outcome:
        variant, facts = self._variant, self._variant.whole.facts
        names = [param.names[0] for param in facts.params]
        state = {name: tensor.to(device, copy=True) for name, tensor in self._state.items()}
        leaves = {name: state[name].requires_grad_(_trains(self._model, name)) for name in names}
        tensors = [tensor.to(device) for tensor in batch.tensors]
        cut = sorted(variant.parts.crossings)
        with torch.enable_grad():
            graph = _run_graph(variant, state, tensors, batch, [variant.whole_of[value] for value in cut], device)
            made = graph if variant.draws else self._run_module(state, tensors)
        outcome = Outcome(values={value: _host(graph[variant.whole_of[value]]) for value in cut})
        distinct = dict.fromkeys(facts.outputs)
        outcome.outputs = {value: _host(made[value]) for value in distinct if value not in facts.inputs}
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        weighted = weigh(variant, seeds(variant, batch.total), batch.rows)
        roots = [(made[value], seed.to(device)) for value, seed in weighted.items() if made[value].requires_grad]
        found = torch.autograd.grad(
            [root for root, _ in roots], list(wanted.values()), [seed for _, seed in roots], allow_unused=True
        )
        outcome.gradients = {
            name: None if grad is None else _host(grad) for name, grad in zip(wanted, found, strict=True)
        }
        outcome.buffers = {buffer.name: _host(state[buffer.name]) for buffer in facts.buffers}
        return outcome

    def _run_module(self, state: Mapping[str, Tensor], tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        captured, facts = self._variant.whole.captured, self._variant.whole.facts
        args, kwargs = unpacked(captured.input_structure.rebuild([tensor.clone() for tensor in tensors]))
        # This rank's model must not have made a call that no other rank's has.
        with AttributeLog(self._model, SourceTracker(self._model)).restoring(), as_given((args, kwargs)) as given:
            result = functional_call(self._model, dict(state), args, kwargs, tie_weights=True)
            return dict(zip(facts.outputs, captured.tensors_of(result, given), strict=True))


def _run_graph(
    variant: Variant,
    state: dict[str, Tensor],
    tensors: Sequence[Tensor],
    batch: Batch,
    cut: Sequence[int],
    device: torch.device,
) -> dict[int, Tensor]:
    """The Values of the cut and the outputs, by the captured Graph; stores buffers where that is what counts."""
    captured, facts = variant.whole.captured, variant.whole.facts
    randomness = Randomness(device)
    randomness.begin(batch.key)
    randomness.at([(0, batch.total)])
    part = StagePart(
        ops=tuple(range(len(facts.ops))),
        inputs=(),
        receives=facts.inputs,
        sends=tuple(cut),
        outputs=tuple(value for value in dict.fromkeys(facts.outputs) if value not in facts.inputs),
        params=tuple(range(len(facts.params))),
        buffers=tuple(range(len(facts.buffers))),
        constants=tuple(range(len(facts.constants))),
        mutated_buffers=(),
    )
    code = StageCode(captured, facts, part, device, randomness)
    kept = (lambda tensor: tensor) if variant.draws else torch.clone
    feeds = {param.value: state[param.names[0]] for param in facts.params}
    feeds |= {buffer.value: kept(state[buffer.name]) for buffer in facts.buffers}
    feeds |= {value: captured.constants[i].to(device) for i, value in enumerate(facts.constants)}
    feeds |= {value: tensor.clone() for value, tensor in zip(facts.inputs, tensors, strict=True)}
    with randomness.borrowed(), no_autocast():
        made = code(batch.total, feeds)
    with torch.no_grad():
        for buffer, update in code.updates.items():
            feeds[buffer].copy_(made[update])
    return made


def weigh(variant: Variant, given: Mapping[int, Tensor], rows: tuple[int, ...]) -> dict[int, Tensor]:
    """Gradients of outputs as all ranks together give them: each rank's counts as much as its rows."""
    total, facts = sum(rows), variant.whole.facts
    shares = torch.cat([torch.full((count,), count / total, dtype=torch.float64, device="cpu") for count in rows])
    weighted = {}
    for value, seed in given.items():
        row_dim = facts.values[value].rows_of_output
        if row_dim is None:
            weighted[value] = seed
            continue
        shape = [1] * seed.dim()
        shape[row_dim.dim] = -1
        weighted[value] = seed * shares.repeat_interleave(row_dim.per_row).view(shape).to(seed.dtype)
    return weighted


def _trains(model: nn.Module, name: str) -> bool:
    return model.get_parameter(name).requires_grad


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
