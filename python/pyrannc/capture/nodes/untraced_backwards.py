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
from pyrannc.capture.torch_internals.tensors import pytree
from pyrannc.capture.user.source import SourceTracker
from pyrannc.errors import CaptureError

from .chance import other_generators_restored, torch_draws


class UntracedBackwards:
    """Those of one trace, which must not see other ranks: each rank runs those of its own Stages alone."""

    def __init__(self) -> None:
        self._trials: list[Callable[[], Any]] = []

    def __bool__(self) -> bool:
        return bool(self._trials)

    def note_call(self, given: Sequence[Any], made: Any) -> None:
        """Notes a call of a custom autograd function, with its arguments and its result without data."""
        takes, gives = _with_gradients(given), _with_gradients(pytree.tree_leaves(made))
        self._note(partial(_differentiate, gives, takes))

    def note_hook(self, hook: Callable[[Tensor], Any], tensor: Tensor) -> None:
        """Notes a hook that gets the gradient of a tensor without data."""
        self._note(lambda: hook(torch.zeros_like(tensor)))

    def refuse_seeing_ranks(self, tracker: SourceTracker) -> None:
        """Tries all of them; what fails for want of data tells nothing.

        Raises:
            CaptureError: one of them counts the ranks or talks with them.
        """
        with (
            as_one_process(tracker) as refused,
            torch_draws(),
            other_generators_restored(),
            torch.no_grad(),
            redirect_stdout(StringIO()),
        ):
            for trial in self._trials:
                with suppress(Exception):
                    trial()
                if refused:
                    raise refused[0]

    def _note(self, trial: Callable[[], Any]) -> None:
        if several_ranks():
            self._trials.append(trial)


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
