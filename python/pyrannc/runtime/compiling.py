"""The Spans of this rank's Stage, compiled when a Plan is deployed; what is not compiled is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyrannc.blocks.compiler import Compiler, Task, assumed, own_folder
from pyrannc.blocks.form import Meta
from pyrannc.call.variant import Variant
from pyrannc.core.gradient_reach import gradient_reach
from pyrannc.core.program import RankProgram
from pyrannc.job import agree, phases, process
from pyrannc.job.progress import Bar
from pyrannc.log import get_logger
from pyrannc.runtime.context import StageContext

_log = get_logger("RaNNCModule")
_MOST_ROW_COUNTS = 8
"""Of one captured call: a script whose batches never have the same size would compile at each step."""
_SHOWN = 3


@dataclass
class Compiling:
    """What is compiled under a Plan.

    Args:
        folder: where compiled code is kept; None for this process alone.

    Attributes:
        refusals: why Spans run as they are, with how many do; of this rank's Stage.
        compiled: how many Spans of how many run compiled, at the rows that were compiled last.
    """

    folder: Path | None
    refusals: dict[str, int] = field(default_factory=dict)
    compiled: tuple[int, int] = (0, 0)
    _met: dict[tuple[int, int], int] = field(default_factory=dict)
    _compiler: Compiler | None = None

    def prepare(self, context: StageContext, variant: Variant, program: RankProgram) -> None:
        """Compiles for the rows of a program, before its step. All ranks call it with programs for the same rows.

        The first program of a captured call that trains is compiled at once, others when they come again.
        """
        key = id(context), id(program)
        met = self._met[key] = self._met.get(key, 0) + 1
        if met > 2:
            return
        of_call = [times for (owner, _), times in self._met.items() if owner == id(context)]
        first = len(of_call) == 1 and program.call != "forward"
        if met != (1 if first else 2) or len(of_call) > _MOST_ROW_COUNTS:
            return
        with phases.phase("RaNNCModule", "compilation", "the compilation of Spans", busy=True):
            agree.together(lambda: self._compile(context, variant, program))
            self._tell(agree.gather_objects((self.compiled, self.refusals)))

    def _compile(self, context: StageContext, variant: Variant, program: RankProgram) -> None:
        if self._compiler is None:
            self._compiler = Compiler(context.device, self._usable_folder())
        compiler = self._compiler
        if compiler.unable:
            self.refusals = {compiler.unable: len(context.code.spans)}
            self.compiled = 0, len(context.code.spans)
            return
        sizes = dict.fromkeys(hi - lo for lo, hi in program.rows if hi > lo)
        tasks = [task for rows in sizes for task in self._tasks(compiler, context, variant, program, rows)]
        distinct = dict.fromkeys((id(task.span.function), task.form) for task in tasks)
        done: set[tuple[int, object]] = set()
        self.refusals, compiled = {}, 0
        with Bar("compiling spans", len(distinct), len(distinct), shown=process.get_rank() == 0) as bar:
            for task in tasks:
                refusal = compiler.compile(task, context.code)
                if refusal is None:
                    compiled += 1
                else:
                    self.refusals[refusal] = self.refusals.get(refusal, 0) + 1
                kind = id(task.span.function), task.form
                if kind not in done:
                    done.add(kind)
                    bar.advance(1.0)
        self.compiled = compiled, len(tasks)

    def _usable_folder(self) -> Path | None:
        if self.folder is None:
            return None
        try:
            return own_folder(self.folder)
        except OSError as error:
            _log.warning("compiled code is not kept for the next start: %s", error)
            return None

    def _tasks(
        self, compiler: Compiler, context: StageContext, variant: Variant, program: RankProgram, rows: int
    ) -> list[Task]:
        facts, part, trains = context.facts, context.parts.stages[context.stage], program.call != "forward"
        known = {value: Meta.of(tensor) for value, tensor in {**context.params, **context.buffers}.items()}
        if context.prologue is not None:
            code = context.prologue.code
            for task in compiler.tasks(code, facts, 0, known, None, trains=trains):
                for place, value in enumerate(task.span.part.gives):
                    requires_grad = trains and facts.values[value].requires_grad
                    guess = assumed(facts, value, 0, requires_grad=requires_grad)
                    known[value] = guess if isinstance(task.seen, str) else task.seen.gives[place]
        for item in part.inputs:
            known[item.value] = assumed(facts, item.value, rows, requires_grad=trains and item.requires_grad)
        for value in part.receives:
            requires_grad = trains and context.parts.crossings[value].requires_grad
            known[value] = assumed(facts, value, rows, requires_grad=requires_grad)
        return compiler.tasks(context.code, facts, rows, known, self._reached(variant, program), trains=trains)

    @staticmethod
    def _reached(variant: Variant, program: RankProgram) -> frozenset[int] | None:
        """The Values that gradients come back for; None where that is not known yet."""
        if program.call != "whole" or variant.loss is None:
            return None
        reached = variant.reached_in_body(frozenset((variant.loss,)))
        return gradient_reach(variant.facts, reached & set(variant.facts.outputs))

    def _tell(self, everyone: Sequence[tuple[tuple[int, int], dict[str, int]]]) -> None:
        counts = [found for found, _ in everyone]
        done, all_ = (sum(count) for count in zip(*counts, strict=True))
        phases.note(f"{done} of {all_} Spans of all ranks run compiled")
        text = told(everyone)
        if text and process.get_rank() == 0:
            _log.warning("%s", text)


def told(everyone: Sequence[tuple[tuple[int, int], dict[str, int]]]) -> str:
    """What is not compiled on some rank, and why; nothing if all is."""
    reasons: dict[str, int] = {}
    for _, refusals in everyone:
        for reason, count in refusals.items():
            reasons[reason] = reasons.get(reason, 0) + count
    if not reasons:
        return ""
    shown = [f"{count} because {reason}" for reason, count in list(reasons.items())[:_SHOWN]]
    more = f"; {len(reasons) - _SHOWN} more reasons" if len(reasons) > _SHOWN else ""
    return f"these Spans run as they are, not compiled: {'; '.join(shown)}{more}"
