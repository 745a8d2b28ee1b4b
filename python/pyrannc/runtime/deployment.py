"""A Plan in force: owners hold their parameters, communicators stand, the optimizer is narrowed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc._native import Plan, Watchdog
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.call.variant import Variant
from pyrannc.job import process
from pyrannc.log import get_logger
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.executor import StageContext
from pyrannc.runtime.position import ActionRecord
from pyrannc.runtime.timing import Timing
from pyrannc.store.gradients import Gradients, SharedParam

_log = get_logger("ParamStorage")


class Deployment:
    """The model spread over the ranks as a Plan says.

    Every rank makes it at the same time.

    Args:
        model: the user's model; the tensors that this rank's Stage holds move to ``device``.
        variant: the captured call that the Plan was made for, divided already.
        plan: the Plan.
        device: this rank's.
        sync_params: give every rank the parameters and buffers of rank 0.
        fused_dropout: as in the configuration.

    Attributes:
        holders: by name, the ranks that hold a parameter or buffer of some Stage.
        timing: when this rank computed in the last steps.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        plan: Plan,
        device: torch.device,
        watchdog: Watchdog | None,
        *,
        sync_params: bool,
        fused_dropout: bool,
    ) -> None:
        self.plan = plan
        self.device = device
        self._model = model
        stages = json.loads(plan.to_json())["stages"]
        self._stage_ranks = [tuple(stage["ranks"]) for stage in stages]
        self._stage_of = [self._stage_of_rank(rank) for rank in range(process.get_world_size())]
        self.stage = self._stage_of[process.get_rank()]
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.params = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.holders = self._find_holders(variant)
        self._own_buffers: set[str] = set()
        if sync_params and process.get_world_size() > 1:
            self._broadcast_from_first()
        self._move()
        self.gradients = self._make_gradients(variant)
        self._channels = Channels(device)
        self._randomness = Randomness(device, fused_dropout=fused_dropout)
        self._record = ActionRecord(watchdog, [_title(number, stage["modules"]) for number, stage in enumerate(stages)])
        self.timing = Timing(device)
        if device.type == "cuda":
            # Peaks are those of the steps: spreading the parameters, and what came before, does not count.
            torch.cuda.reset_peak_memory_stats(device)
        self._contexts: dict[int, StageContext] = {}

    def _stage_of_rank(self, rank: int) -> int:
        return next(stage for stage, ranks in enumerate(self._stage_ranks) if rank in ranks)

    def _find_holders(self, variant: Variant) -> dict[str, tuple[int, ...]]:
        stages: dict[str, set[int]] = {}
        facts = variant.facts
        for stage, part in enumerate(variant.parts.stages):
            names = [facts.params[param].names[0] for param in part.params]
            names += [facts.buffers[buffer].name for buffer in part.buffers]
            for name in names:
                stages.setdefault(name, set()).add(stage)
        return {
            name: tuple(sorted(rank for stage in found for rank in self._stage_ranks[stage]))
            for name, found in stages.items()
        }

    def _changed_by(self, variant: Variant) -> set[str]:
        """Buffers that this rank's Stage changes in a captured call."""
        return {variant.facts.buffers[buffer].name for buffer in variant.parts.stages[self.stage].mutated_buffers}

    def is_local(self, name: str) -> bool:
        """True when this rank's Stage holds the parameter or buffer."""
        return process.get_rank() in self.holders.get(name, ())

    def local_params(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank holds, by first name, in the model's order."""
        return {name: param for name, param in self.params.items() if self.is_local(name)}

    def local_buffers(self) -> dict[str, Tensor]:
        """Buffers that this rank holds, by first name, in the model's order."""
        return {name: buffer for name, buffer in self.buffers.items() if self.is_local(name)}

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        yield from self.params.items()
        yield from self.buffers.items()

    @torch.no_grad()
    def _broadcast_from_first(self) -> None:
        for _, tensor in self._tensors():
            on_device = tensor.to(self.device).contiguous()
            dist.broadcast(on_device, 0, group=process.world())
            if process.get_rank() != 0:
                tensor.copy_(on_device)

    def _move(self) -> None:
        """This rank's tensors go to its device; the others stay, or go back, to the host."""
        moved_bytes = 0
        for name, tensor in self._tensors():
            local = self.is_local(name)
            tensor.data = tensor.data.to(self.device if local else "cpu")
            moved_bytes += tensor.nbytes if local else 0
        _log.debug("this rank holds %.1f MiB of parameters and buffers", moved_bytes / 2**20)

    def _make_gradients(self, variant: Variant) -> Gradients:
        facts = variant.facts
        by_use = sorted(facts.params, key=lambda param: facts.first_use.get(param.value, len(facts.ops)))
        held = [param.names[0] for param in by_use if param.names[0] in self.holders]
        for ranks in [*self._stage_ranks, *sorted({self.holders[name] for name in held})]:
            self._group(ranks)
        shared = [SharedParam(name, self.params[name], self.holders[name]) for name in held if self.is_local(name)]
        return Gradients(shared, self._stage_ranks[self.stage], self._group)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; ``None`` for a single one, which needs none."""
        if len(ranks) == process.get_world_size():
            return process.world()
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        return self._groups[ranks]

    def context(self, variant: Variant) -> StageContext:
        """This rank's Stage for a captured call. All ranks call it for the same calls in the same order."""
        if id(variant) not in self._contexts:
            self._contexts[id(variant)] = self._make_context(variant)
        return self._contexts[id(variant)]

    def _make_context(self, variant: Variant) -> StageContext:
        self._channels.open(self.plan.channels(variant.partition))
        facts, part = variant.facts, variant.parts.stages[self.stage]
        params = {facts.params[i].value: self.gradients.leaves[facts.params[i].names[0]] for i in part.params}
        buffers = {facts.buffers[i].value: self.buffers[facts.buffers[i].name] for i in part.buffers}
        constants = {facts.constants[i]: variant.captured.constants[i].to(self.device) for i in part.constants}
        return StageContext(
            facts=facts,
            parts=variant.parts,
            stage=self.stage,
            code=StageCode(variant.captured, facts, part, self.device, self._randomness),
            params=params,
            buffers={**buffers, **constants},
            stage_of=self._stage_of,
            channels=self._channels,
            gradients=self.gradients,
            randomness=self._randomness,
            record=self._record,
            timing=self.timing,
            device=self.device,
        )

    @torch.no_grad()
    def sync_buffers(self, variant: Variant) -> None:
        """Gives the first Replica's buffers to the others of the Stage, where a call only reads them.

        While calls change a buffer, every Replica has its own.
        """
        changed = self._changed_by(variant)
        ranks = self._stage_ranks[self.stage]
        if len(ranks) > 1:
            for name in sorted(self._own_buffers - changed):
                dist.broadcast(self.buffers[name], ranks[0], group=self._group(ranks))
        self._own_buffers = changed

    @torch.no_grad()
    def bring_back(self) -> None:
        """Gives every rank the whole model, on the host, and destroys the communicators. All ranks call it."""
        for name, tensor in self._tensors():
            if name in self.holders:
                tensor.data = self.full(name, tensor.detach())
            if tensor.grad is not None:
                tensor.grad = None
        self._channels.close()
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)

    @torch.no_grad()
    def full(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's or buffer's shape, from the rank that owns it, on the host of every rank.

        Args:
            name: first name of the parameter or buffer.
            tensor: on the owner, what to give; elsewhere, its shape and type.
        """
        owner = self.holders.get(name, (0,))[0]
        if process.get_world_size() == 1:
            return tensor.to("cpu", copy=True)
        if process.get_rank() == owner:
            on_device = tensor.to(self.device).contiguous()
        else:
            on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        dist.broadcast(on_device, owner, group=process.world())
        return on_device.cpu()

    def owned(self) -> Mapping[str, nn.Parameter]:
        """Parameters that this rank holds first: over all ranks, each parameter of a Stage once."""
        rank = process.get_rank()
        return {name: param for name, param in self.params.items() if self.holders.get(name, (-1,))[0] == rank}


def _title(number: int, modules: list[str]) -> str:
    return f"Stage {number} ({', '.join(modules)})"
