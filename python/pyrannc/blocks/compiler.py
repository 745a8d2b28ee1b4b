"""Compiles the Spans of a Stage, each form of a distinct one once, and holds the code against what it stands for."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from pyrannc.blocks.beside_eager import difference
from pyrannc.blocks.compiled import SpanCode
from pyrannc.blocks.form import Form, Meta
from pyrannc.blocks.function import StageCode
from pyrannc.blocks.graphs import NotCompilable
from pyrannc.blocks.joint import Seen, see, trace
from pyrannc.blocks.kept import KeptCode
from pyrannc.blocks.placed import Fitted, PlacedSpan
from pyrannc.capture.torch_internals.compiler import (
    default_compiler_folder,
    has_compiler_of_host,
    memory_budget,
    start_compiling_processes,
)
from pyrannc.capture.torch_internals.patching import SCRIPT_CALL, SCRIPT_METHOD_CALL
from pyrannc.core.gradient_reach import Senders
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import SpanPart
from pyrannc.errors import first_line
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")
_FOLDER, _FOLDER_OF_TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""The variables that say where compiled code is kept."""
BY_PLAN = "they were measured to be no slower as they are"
"""Why Spans are not compiled that a Plan names."""


@dataclass(frozen=True)
class Task:
    """A Span that may be compiled, at its place.

    Attributes:
        seen: what a run without data has shown, or why it cannot be run so.
    """

    span: PlacedSpan
    form: Form
    seen: Seen | str

    def given(self, facts: GraphFacts) -> dict[int, Meta]:
        """What the Span gives, by Value: as that run has shown, or as the Graph has it."""
        gives = self.span.part.gives
        if not isinstance(self.seen, str):
            return dict(zip(gives, self.seen.gives, strict=True))
        rows, trains = self.form.rows, self.form.trains
        return {
            value: assumed(facts, value, rows, requires_grad=trains and facts.values[value].requires_grad)
            for value in gives
        }


class Compiler:
    """Compiles for one device.

    Args:
        folder: where compiled code is kept from start to start; None for as long as the process lives.
        conditions: what kernels depend on beside what they compute, as it is now.
        eager_spans: hashes of those that stay as they are.
        memory_budget_percent: how much of what a backward needs they may keep for it, instead of computing it again:
            torch's ``activation_memory_budget``; None leaves that as it is.

    Attributes:
        memory_budget_percent: as given.
        unable: why nothing can be compiled here; empty if it can.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path | None,
        conditions: Callable[[], object],
        eager_spans: Set[str] = frozenset(),
        memory_budget_percent: int | None = None,
    ) -> None:
        self.memory_budget_percent = memory_budget_percent
        self._device = device
        self._conditions = conditions
        self._eager_spans = eager_spans
        self._folder = _usable(folder)
        self._kept = KeptCode(self._folder)
        self.unable = "" if has_compiler_of_host() else "there is no C++ compiler (set CXX, or install g++)"

    def tasks(
        self,
        code: StageCode,
        facts: GraphFacts,
        rows: int,
        known: Mapping[int, Meta],
        senders: Senders | None,
        *,
        trains: bool,
        late: Set[int] = frozenset(),
    ) -> list[Task]:
        """The Spans of a Stage in their order.

        Args:
            known: by Value, what comes in from outside.
            senders: from where gradients come; None where all that is given gets some.
            late: Values whose gradients may come later than those that other ranks wait for.
        """
        metas = dict(known)
        found = []
        for span in code.spans:
            form = Form(
                rows,
                trains,
                tuple(metas[value] for value in span.part.takes),
                tuple(_is_wanted(facts, span.part, value, senders) for value in span.part.gives),
                tuple(value in late for value in span.part.takes),
            )
            task = Task(span, form, self._see(span, form, code))
            found.append(task)
            metas.update(task.given(facts))
        return found

    def _see(self, span: PlacedSpan, form: Form, code: StageCode) -> Seen | str:
        seen, function = span.function.seen, span.function
        if form not in seen:
            assert code.randomness is not None, "the code is not for training"
            try:
                with SCRIPT_CALL.replaced_by(_has_no_data), SCRIPT_METHOD_CALL.replaced_by(_has_no_data):
                    seen[form] = see(function.call, form, len(span.numbers), code.randomness, self._device)
            except Exception as error:  # whatever torch cannot do without data
                seen[form] = f"it cannot run without data ({first_line(error)})"
        return seen[form]

    def better(self, code: StageCode) -> list[Task]:
        """The Spans whose code is not for what steps have shown."""
        found = []
        for span in code.spans:
            for key in list(span.fitted):
                form = span.better_form(key)
                if form is not None:
                    found.append(Task(span, form, self._see(span, form, code)))
        return found

    def compile(self, task: Task, code: StageCode) -> str | None:
        """Compiles a Span unless it has been, and puts its code in place.

        Returns:
            Why there is none.
        """
        codes, deterministic = task.span.function.codes, torch.are_deterministic_algorithms_enabled()
        kind = task.form, deterministic
        if kind not in codes:
            codes[kind] = self._compiled(task, code)
        found = codes[kind]
        if isinstance(found, str):
            return found
        key = task.form.rows, task.form.trains, deterministic
        task.span.fitted[key] = Fitted(found, [None] * len(task.form.takes))
        task.span.missed.pop(key, None)
        return None

    def _compiled(self, task: Task, code: StageCode) -> SpanCode | str:
        function, numbers, randomness = task.span.function, len(task.span.numbers), code.randomness
        assert randomness is not None, "the code is not for training"
        if task.span.part.hash_of_all in self._eager_spans:
            return BY_PLAN
        obstacle = self.unable or function.obstacle
        if obstacle:
            return obstacle
        if isinstance(task.seen, str):
            return task.seen
        try:
            with _kept_in(self._folder):
                with memory_budget(self.memory_budget_percent):
                    file = self._kept.file_of(function, task.form, task.seen, self._device, self._conditions())
                    found = self._kept.find(file, function, task.form, task.seen, numbers, randomness)
                    if found is not None:
                        return found
                    if self._device.type == "cuda":
                        start_compiling_processes()
                    joint = trace(function.call, task.form, numbers, task.seen, randomness, self._device)
                made = SpanCode.compile(joint, task.form, function.call, numbers, randomness)
            if made.may_be_recomputed and (made.ends.changed or made.lifted.placed):
                return "a backward may come for some of its results, and it changes buffers or draws inside of a kernel"
            if self._device.type == "cuda":
                # What steps have let go of is kept in pieces of their sizes.
                torch.cuda.empty_cache()
            differs = difference(made, self._device)
            if differs is None:
                self._kept.put(file, made)
        except NotCompilable as error:
            return str(error)
        except Exception as error:  # the compiler may fail in any way; the Span goes on without it
            _log.debug("a Span cannot be compiled", exc_info=True)
            return f"the compiler fails ({first_line(error)})"
        return made if differs is None else f"compiled, {differs}"


def _has_no_data(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("what torch.jit has made needs data")


def _is_wanted(facts: GraphFacts, part: SpanPart, value: int, senders: Senders | None) -> bool:
    """True when what a Span gives gets gradients from elsewhere."""
    return senders is None or not senders.get(facts.root(value), set()) <= set(part.ops)


def assumed(facts: GraphFacts, value: int, rows: int, *, requires_grad: bool) -> Meta:
    """What a Value is like where nothing has shown it: laid out row by row."""
    shape = facts.values[value].shape_at(rows)
    stride = torch.empty(shape, device="meta").stride()
    return Meta(tuple(shape), stride, facts.values[value].dtype, requires_grad)


@contextmanager
def _kept_in(folder: Path | None) -> Iterator[None]:
    """The compiler keeps its code there, unless the user has said where."""
    before = os.environ.get(_FOLDER)
    if folder is None or before not in (None, default_compiler_folder()):
        yield
        return
    triton = os.environ.get(_FOLDER_OF_TRITON)
    os.environ[_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
        if triton is None:
            os.environ.pop(_FOLDER_OF_TRITON, None)


def _usable(folder: Path | None) -> Path | None:
    try:
        return None if folder is None else own_folder(folder)
    except OSError as error:
        _log.warning("compiled code is not kept for the next start: %s", error)
        return None


def own_folder(path: Path) -> Path:
    """A folder that only this user can write to: what is in it is run.

    Raises:
        OSError: it cannot be made, or is another's.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to somebody else")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        path.chmod(0o700)
    return path
