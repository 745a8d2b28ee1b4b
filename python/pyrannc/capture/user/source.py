"""Where in the user's program the trace is: sub-module path and source line."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from pyrannc.capture.torch_internals.patching import MODULE_CALL

from .bound import bound_to

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH_ROOT, "distributions", "")
_OWN_ROOT = f"{Path(__file__).absolute().parents[2]}{os.sep}"
_STDLIB_ROOT = sysconfig.get_paths()["stdlib"] + os.sep
PACKAGES = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class Place:
    """A place in the model: dotted sub-module path ("" for the model itself), file and line."""

    module: str
    file: str | None = None
    line: int = 0

    def __str__(self) -> str:
        module = f"sub-module '{self.module}'" if self.module else "the model"
        return f"{module} ({self.file}:{self.line})" if self.file else module


@dataclass(frozen=True)
class Part:
    """A part of the model that can stay whole.

    Attributes:
        path: of a sub-module.
        method: of the sub-module, instead of its forward.
        function: instead of a sub-module, a function: the Python module that it is called in, and its name there.
        around: path, below the sub-module, of the one that does not stay whole with it.
    """

    path: str
    method: str = ""
    function: tuple[str, str] | None = None
    around: str = ""

    def __str__(self) -> str:
        if self.function:
            return f"function {self.function[1]}"
        owner = f"sub-module '{self.path}'" if self.path else "the model"
        if self.around:
            return f"{owner} but for its sub-module '{self.around}'"
        return f"method {self.method} of {owner}" if self.method else owner

    @property
    def text(self) -> str:
        """As a name that :meth:`of` reads."""
        if self.function:
            return "::".join(self.function)
        if self.around:
            return f"{self.path}>{self.around}"
        return f"{self.path}:{self.method}" if self.method else self.path

    @staticmethod
    def of(text: str) -> Part:
        """From the path of a sub-module, ``path:method``, ``path>sub-module``, or ``python.module::function``."""
        module, _, function = text.partition("::")
        if function:
            return Part("", function=(module, function))
        path, _, around = text.partition(">")
        if around:
            return Part(path, around=around)
        path, _, method = text.partition(":")
        return Part(path, method)

    @property
    def title(self) -> str:
        """In the Graph."""
        if self.function:
            return f"function.{'.'.join(self.function)}"
        if self.around:
            return f"module.{self.text}"
        return f"module.{self.path}" + (f":{self.method}" if self.method else "")

    @property
    def identifier(self) -> str:
        """In generated code."""
        return re.sub(r"\W", "_", self.title)


@cache
def belongs_to_user(file: str) -> bool:
    """True for a source file of neither torch, the standard library nor the tracer."""
    in_stdlib = file.startswith(_STDLIB_ROOT) and PACKAGES not in file
    return not (file.startswith((_TORCH_ROOT, _OWN_ROOT, "<")) or in_stdlib)


def module_of(frame: FrameType) -> str:
    """The name of the Python module whose code runs."""
    return str(frame.f_globals.get("__name__"))


def distribution_asks() -> bool:
    """True where ``torch.distributions`` looks at data that the user's code gives to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not belongs_to_user(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_DISTRIBUTIONS):
            return True
        frame = frame.f_back
    return False


def raised_at(error: BaseException, inside: Place) -> Place:
    """The user's line from which an exception came last; ``inside`` where it came from none."""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if belongs_to_user(file):
            inside = Place(inside.module, file, traceback.tb_lineno)
        traceback = traceback.tb_next
    return inside


class SourceTracker:
    """Knows the sub-module that is running and the user's line in it.

    Attributes:
        calls: of sub-modules that are running, the outermost first: path, and which call of all it is.
        failure: where an exception came from.
        functions: of the user that it came through, the innermost first, up to the forward of the sub-module.
        before_calls: run before each call of a module, with what it is given.
        after_calls: runs after each call of a module.
        strangers: modules that were called and are no sub-modules of the model, by ``id``.
        outermost: code below which nothing is the user's.
        codes: code of the user that has run, with its global variables.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._names: dict[int, str] = {id(module): name for name, module in model.named_modules()}
        self._new: list[nn.Module] = []
        self._stack = [""]
        self._count = 0
        self.calls: tuple[tuple[str, int], ...] = ()
        self.failure: Place | None = None
        self.functions: tuple[Part, ...] = ()
        self.before_calls: list[Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]] = []
        self.after_calls: Callable[[], None] = lambda: None
        self.strangers: dict[int, nn.Module] = {}
        self.outermost: CodeType | None = None
        self.codes: dict[CodeType, dict[str, Any]] = {}

    @property
    def module(self) -> str:
        """Path of the innermost sub-module that is running."""
        return self._stack[-1]

    def here(self) -> Place:
        """The innermost running frame that belongs to neither torch, the standard library nor the tracer."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if belongs_to_user(frame.f_code.co_filename):
                return Place(self.module, frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return Place(self.module)

    def note_code(self) -> None:
        """Notes what code of the user is running in the model, with its global variables."""
        frame: FrameType | None = sys._getframe(1)
        running: dict[CodeType, dict[str, Any]] = {}
        while frame is not None:
            if frame.f_code is self.outermost:
                self.codes.update(running)
                return
            # In this order, as it takes long to hash code.
            if belongs_to_user(frame.f_code.co_filename) and frame.f_code not in self.codes:
                running[frame.f_code] = frame.f_globals
            frame = frame.f_back

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follows module calls while active; on an exception, keeps the innermost place in ``failure``."""
        original = MODULE_CALL.original
        tracker, own = self, threading.get_ident()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != own:
                return original(module, *args, **kwargs)
            outer = tracker.calls
            tracker._stack.append(tracker._path(module))
            tracker._count += 1
            tracker.calls = (*outer, (tracker.module, tracker._count))
            try:
                for look in tracker.before_calls:
                    look(module, args, kwargs)
                result = original(module, *args, **kwargs)
                tracker.after_calls()
                return result
            except Exception as error:
                if tracker.failure is None:
                    tracker.failure = raised_at(error, Place(tracker.module))
                    tracker.functions = tracker._functions_of(error)
                raise
            finally:
                tracker._stack.pop()
                tracker.calls = outer

        try:
            with MODULE_CALL.replaced_by(call):
                yield
        finally:
            # Sizes in the graph lead to this tracker, and these to the model.
            self.before_calls.clear()

    def _path(self, module: nn.Module) -> str:
        """Of a sub-module, also of one that the call has put into the model; of a stranger, that of what calls it."""
        if id(module) not in self._names and id(module) not in self.strangers:
            self._find_new(module)
        return self._names.get(id(module), self._stack[-1])

    def _find_new(self, stranger: nn.Module) -> None:
        model = self._model()
        found = {} if model is None else {module: name for name, module in model.named_modules()}
        new = [module for module in found if id(module) not in self._names]
        # Kept, so that an id names one module.
        self._new += new
        self._names.update((id(module), found[module]) for module in new)
        if stranger not in found:
            self.strangers[id(stranger)] = stranger

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """What runs inside runs again at each call, and is not what is captured."""
        before, self.after_calls = self.after_calls, lambda: None
        try:
            yield
        finally:
            self.after_calls = before

    def _functions_of(self, error: BaseException) -> tuple[Part, ...]:
        frames: list[FrameType] = []
        traceback = error.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        # What decorates a function stands between.
        users = [frame for frame in frames if belongs_to_user(frame.f_code.co_filename)]
        # The first is the forward itself.
        found = [self._part(caller, frame) for caller, frame in pairwise(users)]
        return tuple(part for part in reversed(found) if part is not None)

    def _part(self, caller: FrameType, frame: FrameType) -> Part | None:
        """The method of a sub-module, or the function, whose call a frame is, if its name is looked up at each call."""
        code = frame.f_code
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            held = getattr(type(owner), code.co_name, None)
            known = id(owner) in self._names and _code_of(held) is code and code.co_name != "forward"
            return Part(self._names[id(owner)], method=code.co_name) if known else None
        held = caller.f_globals.get(code.co_name)
        # What stays whole stands there while it is tried.
        held = getattr(bound_to(held), "original", held)
        module = caller.f_globals.get("__name__")
        known = _code_of(held) is code and isinstance(module, str) and module in sys.modules
        return Part("", function=(str(module), code.co_name)) if known else None


def _code_of(held: Any) -> CodeType | None:
    """Of a function, inside of what decorates it."""
    return getattr(inspect.unwrap(held), "__code__", None) if callable(held) else None
