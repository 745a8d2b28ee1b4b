"""A Plan in force: owners hold their parameters, communicators stand, Stages can run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from pyrannc._native import Buckets, Plan, Watchdog
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.randomness import Randomness
from pyrannc.call.variant import Variant
from pyrannc.capture.torch_internals.gradients import tensor_hooks
from pyrannc.core.buckets import BucketsFacts
from pyrannc.core.plan import PlanFacts, StagePlan
from pyrannc.core.program import RankProgram
from pyrannc.errors import PlanError
from pyrannc.job import agree, process
from pyrannc.runtime.by_hosts import ByHosts
from pyrannc.runtime.channels import Channels
from pyrannc.runtime.collectives import Groups, beside_all, close
from pyrannc.runtime.compiling import Compiling
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.dropped import end_dropped, when_dropped
from pyrannc.runtime.exchanges import Exchanges
from pyrannc.runtime.peaks import begin_peaks
from pyrannc.runtime.position import ActionRecord
from pyrannc.runtime.precision import precision
from pyrannc.runtime.prologue import PrologueCode
from pyrannc.runtime.recording import Recordings
from pyrannc.runtime.span_gathers import gathers_of
from pyrannc.runtime.tail import TailCode
from pyrannc.runtime.timing import Timing
from pyrannc.runtime.working_part import working_part
from pyrannc.store.buckets import Bucket, SumTypes, own_buckets
from pyrannc.store.divided import DividedParams
from pyrannc.store.gradients import Gradients
from pyrannc.store.optimizer import UserOptimizer
from pyrannc.store.store import ParamStore
from pyrannc.store.working_copies import Key


class Deployment:
    """The model spread over the ranks as a Plan says.

    Every rank makes it at the same time. Where it is dropped, its communicators end when the next one is made.

    Args:
        model: the user's model; the tensors that this rank's Stage holds move to ``device``.
        variant: the captured call that the Plan was made for, divided already.
        plan: the Plan.
        optimizer: the user's, if there is one.
        device: this rank's.
        sync_params: give every rank the parameters and buffers of rank 0.
        fused_dropout: as in the configuration.
        reduce_dtype: likewise.
        compiling: what Spans are compiled by; None leaves them as they are.
        records: runs are recorded as CUDA graphs, where they can be.

    Attributes:
        compiling: as given.
        recordings: what has been recorded.
        store: where parameters and buffers lie.
        buckets: which gradients are summed together.
        gradients: of the parameters that this rank holds.
        stage: this rank's.
        timing: when this rank computed in the last steps.
    """

    def __init__(
        self,
        model: nn.Module,
        variant: Variant,
        plan: Plan,
        optimizer: UserOptimizer | None,
        device: torch.device,
        watchdog: Watchdog | None,
        *,
        sync_params: bool,
        fused_dropout: bool,
        reduce_dtype: str,
        compiling: Compiling | None = None,
        records: bool = False,
    ) -> None:
        end_dropped()
        self.compiling = compiling
        self.recordings = Recordings() if records else None
        self.plan = plan
        self._optimizer = optimizer
        facts = PlanFacts.of(plan)
        stages = facts.stages
        self._sums = SumTypes(reduce_dtype, facts.microbatches > 1)
        self._divides = facts.divides
        self._first = variant
        self.device = device
        self._stage_ranks = [stage.ranks for stage in stages]
        self._stage_of = [self._stage_of_rank(rank) for rank in process.all_ranks()]
        self.stage = self._stage_of[process.get_rank()]
        self.store = ParamStore(model, self._find_holders(variant), device, sync_params=sync_params)
        self._groups, self._gathering_groups = Groups(), Groups(apart=True)
        self._channels = Channels(device)
        self._exchanges = Exchanges(device)
        self._by_hosts = ByHosts(device)
        made = self._channels, self._exchanges, self._by_hosts, self._groups, self._gathering_groups
        self._ends: list[Callable[[], None]] = [each.close for each in made]
        if self.recordings is not None:
            self._ends.insert(0, partial(_drop_graphs, weakref.ref(self.recordings)))
        self._dropped = when_dropped(self, partial(_call_all, self._ends))
        self.gradients = self._make_gradients(variant)
        # Ranks of one Stage wait for each other's gradients anyway.
        self._totals = beside_all(device) if len(stages) > 1 else None
        self._ends.append(partial(close, self._totals))
        self._randomness = Randomness(device, fused_dropout=fused_dropout)
        self._record = ActionRecord(watchdog, [_title(number, stage) for number, stage in enumerate(stages)])
        self.timing = Timing(device)
        # Parameters were spread.
        begin_peaks(device)
        self._contexts: dict[int, StageContext] = {}
        self._shared: dict[int, list[tuple[str, int, tuple[int, ...]]]] = {}

    @property
    def stages(self) -> int:
        """Number of Stages."""
        return len(self._stage_ranks)

    @property
    def precision(self) -> str:
        """In which types the call that the Plan was made for computes, in words."""
        return precision(self._first, self._sums, max(map(len, self._stage_ranks)))

    def _stage_of_rank(self, rank: int) -> int:
        return next(stage for stage, ranks in enumerate(self._stage_ranks) if rank in ranks)

    def _find_holders(self, variant: Variant) -> dict[str, tuple[int, ...]]:
        everyone = process.all_ranks()
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
        } | dict.fromkeys(variant.names_in_tail, everyone)

    def _make_gradients(self, variant: Variant) -> Gradients:
        facts, holders = variant.facts, self.store.holders
        names = [param.names[0] for param in facts.params]
        trained = [i for i, name in enumerate(names) if name in holders and self.store.params[name].requires_grad]
        everywhere = {i for i, name in enumerate(names) if name in variant.names_in_tail}
        listed = set() if self._optimizer is None else set(map(id, self._optimizer.all()))
        hooked = self._hooked() if self._divides else set()
        self.buckets = Buckets.divide(
            self.plan,
            variant.partition,
            variant.graph,
            trained=trained,
            everywhere=sorted(everywhere),
            reduce_dtype=self._sums.reduce,
            undivided=[i for i in trained if id(self.store.params[names[i]]) not in listed],
            whole_gradients=[i for i in trained if names[i] in hooked],
            by_element=self._divides and self._is_by_element(),
        )
        found = BucketsFacts.from_json(self.buckets.to_json())
        for ranks in found.groups:
            self._groups.of(ranks)
        shared = self.store.shared([name for name in names if name in holders])
        own = agree.together(lambda: own_buckets(found, names, shared, self._sums, self.device))
        self.store.move(self._dividing(found, own, names))
        gathered = {} if self.store.divided is None else self.store.divided.gathered
        return Gradients(shared, own, gathered, self._groups.of)

    def _dividing(self, facts: BucketsFacts, own: list[Bucket], names: list[str]) -> Callable[[], DividedParams] | None:
        """What leaves each Replica its parts of parameters, with groups for them; None where nothing is divided.

        All ranks call it.
        """
        if self._optimizer is None or not any(bucket.parts for bucket in facts.buckets):
            return None
        for ranks in facts.groups if any(bucket.is_gathered for bucket in facts.buckets) else ():
            self._gathering_groups.of(ranks)
        optimizer, sizes = self._optimizer.optimizer, {name: p.numel() for name, p in self.store.params.items()}
        groups = self._groups.of, self._gathering_groups.of
        return lambda: DividedParams(own, facts, names, sizes, groups, optimizer)

    def _is_by_element(self) -> bool:
        """True when the optimizer may be given parts of parameters, as trials on all ranks say. All ranks call it."""
        return all(agree.gather_objects(self._optimizer is not None and self._optimizer.is_by_element))

    def _hooked(self) -> set[str]:
        """Names of the parameters that have hooks on some rank, which get whole gradients. All ranks call it."""
        own = {name for name, param in self.store.params.items() if any(tensor_hooks(param))}
        found: list[set[str]] = agree.gather_objects(own)
        return set().union(*found)

    def context(self, variant: Variant, program: RankProgram) -> StageContext:
        """This rank's Stage for a captured call, connected to those that it exchanges rows with in a program. All ranks
        call it for the same calls and rows in the same order."""
        if id(variant) not in self._contexts:
            # Code is written before the first message, so that no rank waits for one that fails.
            codes, tail = agree.together(lambda: (self._make_code(variant), self._make_tail(variant)))
            self._channels.open(self.plan.channels(variant.partition))
            self._contexts[id(variant)] = self._make_context(variant, *codes, tail)
        self._exchanges.open(program)
        return self._contexts[id(variant)]

    def prepare(self, variant: Variant, program: RankProgram) -> StageContext:
        """Likewise, with code for the rows. All ranks call it."""
        context = self.context(variant, program)
        if self.compiling is not None:
            self.compiling.prepare(context, variant, program)
        return context

    def _make_code(self, variant: Variant) -> tuple[StageCode, PrologueCode | None, Mapping[int, Key]]:
        """The Stage's code, what of it runs once a step, and the working copies that both take, by Value."""
        captured, facts = variant.captured, variant.facts
        working = working_part(captured, facts, variant.parts.stages[self.stage])
        once, each = working.part.apart()
        gathers = gathers_of(facts, once, each, working.copies, self.gradients.gathered)
        compiled = self.compiling is not None
        code = StageCode(captured, facts, each, self.device, self._randomness, gathers, channels_last=compiled)
        if once is None:
            return code, None, working.copies
        names = {facts.params[i].value: facts.params[i].names[0] for i in each.params}
        names |= {value: name for value, (name, _) in working.copies.items()}
        first = StageCode(captured, facts, once, self.device, self._randomness, channels_last=compiled)
        return code, PrologueCode(first, facts, once, names), working.copies

    def _make_context(
        self,
        variant: Variant,
        code: StageCode,
        prologue: PrologueCode | None,
        taken: Mapping[int, Key],
        tail: TailCode | None,
    ) -> StageContext:
        facts, part = variant.facts, variant.parts.stages[self.stage]
        params = {facts.params[i].value: self.gradients.leaves[facts.params[i].names[0]] for i in part.params}
        copies = self.gradients.working_copies(taken.values())
        params |= {value: copies[name] for value, (name, _) in taken.items()}
        names = {facts.buffers[i].value: facts.buffers[i].name for i in part.buffers}
        buffers = {value: self.store.buffer_to_compute_with(name) for value, name in names.items()}
        constants = {facts.constants[i]: variant.captured.constants[i].to(self.device) for i in part.constants}
        return StageContext(
            facts=facts,
            parts=variant.parts,
            stage=self.stage,
            code=code,
            prologue=prologue,
            tail=tail,
            params=params,
            copies=copies,
            copied=taken,
            stage_params=frozenset(facts.params[i].names[0] for i in part.params),
            buffers={**buffers, **constants},
            stage_of=self._stage_of,
            channels=self._channels,
            exchanges=self._exchanges,
            gradients=self.gradients,
            randomness=self._randomness,
            record=self._record,
            timing=self.timing,
            device=self.device,
            totals=self._totals,
            by_hosts=self._by_hosts if variant.whole_part else None,
        )

    def _make_tail(self, variant: Variant) -> TailCode | None:
        if variant.tail is None:
            return None
        return TailCode(
            variant.whole,
            variant.tail,
            self.gradients.leaves.__getitem__,
            self.store.buffer_to_compute_with,
            self.device,
            self._randomness,
        )

    def refuse_unheld(self, variant: Variant) -> None:
        """Raises PlanError when every rank must hold something for a captured call, and not all can."""
        added = self.added_buffers(variant)
        if added:
            raise PlanError(f'this call uses buffer "{added[0]}", which the model did not have when it was deployed')
        for name in self._unheld(variant):
            if name in self.store.params:
                raise PlanError(
                    f'this call uses "{name}" together with all rows of the batch, which the call that the plan was '
                    "made for did not, so not every rank holds it"
                )

    def hold_buffers(self, variant: Variant) -> bool:
        """Gives every rank the buffers that it must hold for a captured call; True if there were any. All ranks call
        it."""
        names = self._unheld(variant)
        for name in names:
            self.store.hold_everywhere(name)
        if names:
            self._shared.clear()
        return bool(names)

    def _unheld(self, variant: Variant) -> list[str]:
        """What every rank must hold for a captured call, and some do not, or in parts."""
        everyone, store = process.all_ranks(), self.store
        return [n for n in variant.names_in_tail if store.holders.get(n) != everyone or store.is_in_parts(n)]

    def added_buffers(self, variant: Variant) -> list[str]:
        """First names of the buffers of a captured call that the model did not have when it was deployed."""
        return [buffer.name for buffer in variant.whole.facts.buffers if buffer.name not in self.store.buffers]

    def renew_gradients(self) -> None:
        """Follows ``requires_grad`` of the parameters, which is equal on all ranks. All ranks call it."""
        self.gradients.reduce_pending()
        self.store.make_whole()
        if self.recordings is not None:
            self.recordings.forget_all()
        self.gradients = self._make_gradients(self._first)
        self._contexts.clear()

    def forget(self, variant: Variant) -> None:
        """Lets go of what was made for a captured call."""
        self._shared.pop(id(variant), None)
        context = self._contexts.pop(id(variant), None)
        if context is not None and self.compiling is not None:
            self.compiling.forget(context)
        if context is not None and self.recordings is not None:
            self.recordings.forget(context)

    def sync_buffers(self, variant: Variant, program: RankProgram) -> None:
        """Gives the first Replica's buffers to the others of the Stage, unless the captured call changes them by rows.

        Args:
            program: for the rows of the call.
        """
        facts, ranks = variant.facts, self._stage_ranks[self.stage]
        changed = [facts.buffers[i] for i in variant.parts.stages[self.stage].mutated_buffers]
        own = {buffer.name for buffer in changed if buffer.value not in facts.buffers_changed_alike}
        # The first Replica has the most rows; one without any changes nothing.
        idle = max(program.microbatches) < len(ranks)
        missed = {buffer.name for buffer in changed} - own if idle else set()
        self.store.sync_buffers(own, missed, ranks, self._groups.of(ranks))

    def share_buffers(self, variant: Variant) -> None:
        """Gives the buffers that a Stage changes in a captured call to the other ranks that hold them. All ranks call
        it after the call."""
        if id(variant) not in self._shared:
            self._shared[id(variant)] = list(self._changed_and_shared(variant))
        for name, owner, ranks in self._shared[id(variant)]:
            group = self._groups.of(ranks)
            if process.get_rank() in ranks:
                self.store.share_buffer(name, owner, group)

    def _changed_and_shared(self, variant: Variant) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Buffers that a Stage changes and others hold, too: the rank whose contents count, and that with the others.

        What the first call did not use, all ranks hold.
        """
        everyone = process.all_ranks()
        for ranks, part in zip(self._stage_ranks, variant.parts.stages, strict=True):
            for name in sorted(variant.facts.buffers[buffer].name for buffer in part.mutated_buffers):
                others = set(self.store.holders.get(name, everyone)) - set(ranks)
                if others:
                    yield name, ranks[0], tuple(sorted({ranks[0], *others}))

    def bring_back(self) -> None:
        """Gives every rank the whole model, on the host, and destroys the communicators. All ranks call it."""
        if self.recordings is not None:
            self.recordings.drop()
        self.store.bring_back()
        self._dropped.detach()
        _call_all(self._ends)


def _drop_graphs(recordings: weakref.ref[Recordings]) -> None:
    """Communicators wait for the graphs that use them, which a loss that the script still has would keep."""
    left = recordings()
    if left is not None:
        left.drop()


def _call_all(ends: Iterable[Callable[[], None]]) -> None:
    for end in ends:
        end()


def _title(number: int, stage: StagePlan) -> str:
    return f"Stage {number} ({', '.join(stage.modules)})"
