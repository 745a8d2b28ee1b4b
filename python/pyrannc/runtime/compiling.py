"""The Spans of this rank's Stage, compiled when a Plan is deployed; what is not compiled is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from pyrannc.blocks.compiler import BY_PLAN, Compiler, Task, assumed
from pyrannc.blocks.form import Meta
from pyrannc.blocks.placed import PlacedSpan
from pyrannc.call.variant import Variant
from pyrannc.capture.torch_internals.compiler import begin_loading_compiler
from pyrannc.core.gradient_reach import Senders, gradient_senders
from pyrannc.core.program import RankProgram
from pyrannc.job import agree, phases, process
from pyrannc.job.progress import Bar
from pyrannc.log import get_logger
from pyrannc.runtime.context import StageContext
from pyrannc.runtime.peaks import begin_peaks

_log = get_logger("RaNNCModule")
_MOST_ROW_COUNTS = 8
"""Of one captured call: a script whose batches never have the same size would compile at each step."""
_MOST_FORMS = 8
"""Captured calls that are compiled under a Plan: as many times as torch itself compiles a function."""
_MORE_UNDER_BUDGET = 8
"""So many times more of both, where what isn't compiled keeps more than the Plan has memory for."""
_MOST_MET = 3
"""Steps of a program after which its code stays as it is."""
_SHOWN = 3


@dataclass(frozen=True)
class Outcome:
    """What has become of the Spans of some ranks, at the row counts that occur.

    Attributes:
        done: how many run compiled.
        all: how many there are.
        refusals: why the others run as they are, with how many do.
    """

    done: int = 0
    all: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def joined(parts: Sequence[Outcome]) -> Outcome:
        """That of all ranks together."""
        refusals: Counter[str] = Counter()
        for part in parts:
            refusals.update(part.refusals)
        return Outcome(sum(part.done for part in parts), sum(part.all for part in parts), refusals)

    def __str__(self) -> str:
        text = f"{self.done} of {self.all} Spans run compiled"
        shown = [f"{count} because {reason}" for reason, count in list(self.refusals.items())[:_SHOWN]]
        more = [f"others for {len(self.refusals) - _SHOWN} more reasons"] if len(self.refusals) > _SHOWN else []
        return f"{text}; not compiled are {'; '.join([*shown, *more])}" if shown else text


class Compiling:
    """What is compiled under a Plan.

    Args:
        folder: where compiled code is kept; None for this process alone.
        conditions: what kernels depend on beside what they compute, as it is now.
        eager_spans: hashes of the Spans that stay as they are.
        memory_budget_percent: how much of what a backward needs the others may keep; None: whatever they would.
    """

    def __init__(
        self,
        folder: Path | None,
        conditions: Callable[[], object],
        eager_spans: Set[str] = frozenset(),
        memory_budget_percent: int | None = None,
    ) -> None:
        self._folder = folder
        self._conditions = conditions
        self._eager_spans = eager_spans
        self._memory_budget_percent = memory_budget_percent
        self._more = 1 if memory_budget_percent is None else _MORE_UNDER_BUDGET
        # Meanwhile ranks wait for one another, and for their devices.
        self._loading = begin_loading_compiler()
        self._met: dict[int, dict[int, int]] = {}
        self._forms: set[int] = set()
        self._count = 0
        self._compiler: Compiler | None = None
        self._refusals: dict[tuple[int, object], str] = {}
        self._places: dict[tuple[int, object], PlacedSpan] = {}

    def prepare(self, context: StageContext, variant: Variant, program: RankProgram) -> None:
        """Compiles for the rows of a program, before its step. All ranks call it with programs for the same rows.

        The first program of a captured call that trains is compiled at once, others when they come again, as are those
        of lengths that another call's trace serves. Where the Plan counts on a memory budget, all that train are
        compiled at once. A step later follows what turned out to be otherwise.
        """
        self._loading.join()
        programs = self._met.setdefault(id(context), {})
        met = programs[id(program)] = programs.get(id(program), 0) + 1
        if met > _MOST_MET or len(programs) > _MOST_ROW_COUNTS * self._more:
            return
        is_first = variant.has_own_trace and next(iter(programs)) == id(program)
        at_once = program.call != "forward" and (is_first or self._memory_budget_percent is not None)
        if met == (1 if at_once else 2):
            if not self._takes(context):
                return
            self._compile(context, lambda: self._tasks(context, variant, program))
        elif met > 1 and id(context) in self._forms:
            better = [] if self._compiler is None else self._compiler.better(context.code)
            if any(agree.gather_objects(bool(better))):
                self._compile(context, lambda: better)

    def forget(self, context: StageContext) -> None:
        """Lets go of what is known of a Stage's code."""
        self._met.pop(id(context), None)
        self._forms.discard(id(context))

    def _takes(self, context: StageContext) -> bool:
        """True for one of the first captured calls; that others run as they are is told once."""
        if id(context) not in self._forms:
            self._count += 1
            most = _MOST_FORMS * self._more
            if self._count == most + 1 and process.get_rank() == 0:
                _log.warning(
                    "Spans are compiled for the first %d kinds of calls%s, and run as they are for others, such as "
                    "further lengths%s: pad rows to multiples of a number, such as 64 or 128, so that fewer lengths "
                    "occur",
                    most, " that come again" if self._more == 1 else "",
                    "" if self._more == 1 else ", which take more memory than the plan counts on",
                )  # fmt: skip
            if self._count > most:
                return False
            self._forms.add(id(context))
        return True

    @property
    def own(self) -> Outcome:
        """What has become of this rank's Spans."""
        refusals: Counter[str] = Counter()
        for key in self._places:
            reason = self._refusals.get(key)
            if reason is None and self._places[key].missed:
                reason = "they are given tensors of another layout than expected"
            if reason is not None:
                refusals[reason] += 1
        return Outcome(len(self._places) - sum(refusals.values()), len(self._places), refusals)

    def _compile(self, context: StageContext, find: Callable[[], list[Task]]) -> None:
        before = self.own.refusals
        with phases.phase("RaNNCModule", "compilation", "the compilation of Spans", busy=True):
            agree.together(lambda: self._compile_own(context, find()))
            outcomes: list[tuple[Outcome, bool]] = agree.gather_objects((self.own, self.own.refusals != before))
            outcome = Outcome.joined([found for found, _ in outcomes])
            phases.note(f"{outcome.done} of {outcome.all} Spans of all ranks run compiled")
        unexpected = outcome.refusals.keys() - {BY_PLAN}
        if unexpected and any(is_new for _, is_new in outcomes) and process.get_rank() == 0:
            _log.warning("%s", outcome)

    def _compile_own(self, context: StageContext, tasks: Sequence[Task]) -> None:
        compiler = self._compiler
        assert compiler is not None, "there are tasks"
        left = {(id(task.span.function), task.form) for task in tasks}
        with Bar("compiling spans", len(left), len(left), shown=process.get_rank() == 0) as bar:
            for task in tasks:
                refusal = compiler.compile(task, context.code)
                place = id(task.span), (task.form.rows, task.form.trains)
                self._places[place] = task.span
                self._refusals.pop(place, None)
                if refusal is not None:
                    self._refusals[place] = refusal
                kind = id(task.span.function), task.form
                if kind in left:
                    left.remove(kind)
                    bar.advance(1.0)
        # Code was compared with the operators.
        begin_peaks(context.device)

    def _tasks(self, context: StageContext, variant: Variant, program: RankProgram) -> list[Task]:
        if self._compiler is None:
            self._compiler = Compiler(
                context.device, self._folder, self._conditions, self._eager_spans, self._memory_budget_percent
            )
        sizes = dict.fromkeys(hi - lo for lo, hi in program.rows if hi > lo)
        return [task for rows in sizes for task in self._tasks_at(self._compiler, context, variant, program, rows)]

    def _tasks_at(
        self, compiler: Compiler, context: StageContext, variant: Variant, program: RankProgram, rows: int
    ) -> list[Task]:
        facts, part, trains = context.facts, context.parts.stages[context.stage], program.call != "forward"
        known = {value: Meta.of(tensor) for value, tensor in {**context.params, **context.buffers}.items()}
        if context.prologue is not None:
            code = context.prologue.code
            for task in compiler.tasks(code, facts, 0, known, None, trains=trains):
                known.update(task.given(facts))
        late = frozenset(known) if self._has_late_gradients(context, program) else frozenset()
        for item in part.inputs:
            known[item.value] = assumed(facts, item.value, rows, requires_grad=trains and item.requires_grad)
        for value in part.receives:
            requires_grad = trains and context.parts.crossings[value].requires_grad
            known[value] = assumed(facts, value, rows, requires_grad=requires_grad)
        senders = self._senders(variant, program)
        return compiler.tasks(context.code, facts, rows, known, senders, trains=trains, late=late)

    @staticmethod
    def _has_late_gradients(context: StageContext, program: RankProgram) -> bool:
        """True when backwards have a second part, for gradients that no other rank waits for."""
        part, crossings = context.parts.stages[context.stage], context.parts.crossings
        sends_back = any(item.requires_grad for item in part.inputs) or any(
            crossings[value].requires_grad for value in part.receives
        )
        return program.splits_backward and sends_back and not context.code.keeps_whole

    @staticmethod
    def _senders(variant: Variant, program: RankProgram) -> Senders:
        """From where gradients come; with a criterion outside, from all outputs."""
        inside = program.call == "whole" and variant.loss is not None
        return gradient_senders(variant.facts, variant.starts if inside else set(variant.facts.outputs))
