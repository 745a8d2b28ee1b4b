"""Backwards of custom autograd functions and hooks of gradients: no trace runs them, so they are tried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from pyrannc.capture.reads.as_one_process import as_one_process
from pyrannc.capture.torch_internals.functions import functions_applied_by
from pyrannc.capture.torch_internals.patching import several_ranks
from pyrannc.capture.torch_internals.symbols import ShapeQuestions, hint
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.source import Place, SourceTracker
from pyrannc.errors import CaptureError

from .chance import other_generators_restored, torch_draws
from .foreign import ForeignOperands
from .untraceable import UntraceableError

Hook = Callable[[Tensor], Any]


class UntracedBackwards:
    """Those of one trace.

    They must not see other ranks: each rank runs those of its own Stages alone. And hooks use nothing of the forward
    that they stand in, which runs once.

    Args:
        tracker: knows where the forward is.
        shape_env: of the trace.
    """

    def __init__(self, tracker: SourceTracker, shape_env: ShapeQuestions) -> None:
        self._tracker = tracker
        self._shape_env = shape_env
        self._functions: list[Callable[[], Any]] = []
        self._hooks: list[tuple[Hook, Tensor, Place]] = []

    def __bool__(self) -> bool:
        return bool(self._functions or self._hooks)

    def note_call(self, given: Sequence[Any], made: Any) -> None:
        """Notes a call of a custom autograd function, with its arguments and its result without data."""
        if several_ranks():
            takes, gives = _with_gradients(given), _with_gradients(pytree.tree_leaves(made))
            self._functions.append(partial(_differentiate, gives, takes))

    def note_hook(self, hook: Hook, tensor: Tensor) -> None:
        """Notes a hook that gets the gradient of a tensor without data."""
        self._hooks.append((hook, tensor, self._tracker.here()))

    def try_all(self) -> None:
        """Tries all of them, without data; what fails for want of data tells nothing.

        What they ask of the number of rows says nothing of the trace, which has ended.

        Raises:
            CaptureError: one of them counts the ranks or talks with them, or a hook changes a tensor.
            UntraceableError: a hook uses a tensor, or a number of rows, of the forward.
        """
        with (
            as_one_process(self._tracker) as refused,
            torch_draws(),
            other_generators_restored(),
            torch.no_grad(),
            redirect_stdout(StringIO()),
            self._shape_env.suppress_guards(),
        ):
            for function in self._functions:
                with suppress(Exception):
                    function()
            for hook, tensor, place in self._hooks:
                self._refuse_beside(hook, tensor, place)
            if refused and several_ranks():
                raise refused[0]

    def _refuse_beside(self, hook: Hook, tensor: Tensor, place: Place) -> None:
        # Its extents are plain numbers: what asks for a symbol asks for one of the forward.
        shape = [hint(size) if isinstance(size, torch.SymInt) else size for size in tensor.shape]
        gradient = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        asked = self._shape_env.asked_aside
        with suppress(Exception), ForeignOperands(gradient) as seen:
            hook(gradient)
        if seen.found or self._shape_env.asked_aside > asked:
            cause = "a hook of gradients uses what its forward has computed, which other calls have anew"
            raise UntraceableError(f"{place} cannot be captured: {cause}", place, cause)
        if seen.changes:
            raise CaptureError(
                f"a hook of gradients at {place} changes a tensor in place, as each rank would for gradients that "
                "it has: compute that from gradients of parameters after backward()"
            )


@contextmanager
def backwards_tried() -> Iterator[None]:
    """While active, the backward of each custom autograd function runs right behind it, if it can.

    Raises:
        CaptureError: one of them counts the ranks or talks with them.
    """
    own = threading.get_ident()

    def apply(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        made = original(function, *args, **kwargs)
        if threading.get_ident() == own and torch.is_grad_enabled():
            try:
                _differentiate(_with_gradients(pytree.tree_leaves(made)), _with_gradients(args))
            except CaptureError:
                raise
            except Exception:  # gradients of zeros may be none for it
                return made
        return made

    with functions_applied_by(apply) if several_ranks() else nullcontext():
        yield


def _with_gradients(items: Sequence[Any]) -> list[Tensor]:
    return [item for item in items if isinstance(item, Tensor) and item.requires_grad]


def _differentiate(gives: list[Tensor], takes: list[Tensor]) -> None:
    seeds = list(map(torch.zeros_like, gives))
    torch.autograd.grad(gives, takes, seeds, retain_graph=True, allow_unused=True)
