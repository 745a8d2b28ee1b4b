"""What stays whole but for one sub-module: it runs until the sub-module is called, and again with what that has made.

So a detection model's backbone is captured and cut, though lists of images come before it and losses over lists of
boxes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.capture.torch_internals.modules import hooks_of_calls
from pyrannc.capture.torch_internals.tracing import current_tracer
from pyrannc.capture.user.flatten import flatten
from pyrannc.capture.user.source import Part
from pyrannc.errors import CaptureError

from .kept_whole import Trials, Tried, WholeCall

_RELATIVE = 1e-3
"""By how much what comes to the sub-module may differ between the two runs: by rounding, not by chance."""


class _ReachedError(BaseException):
    """Ends a run at the call of the sub-module. No code of the user may take it for an error."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given


class CallAround(WholeCall):
    """Makes what stands round the call of a sub-module two opaque Ops, and leaves the sub-module to the trace."""

    def __init__(self, model: nn.Module, part: Part, trials: Trials) -> None:
        super().__init__(model, part, trials)
        self._inner: nn.Module = self._module.get_submodule(part.around)
        self._before = _Before(model, part, trials, self._until_reached)
        self._after = _After(model, part, trials, self._with_result)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if current_tracer() is None or functorch_is_active():
            return self.original(*args, **kwargs)
        if any(hooks_of_calls(self._inner)):
            raise self._untraceable(f"'{self._part.around}' has hooks, which would run twice")
        given = self._before(*args, **kwargs)
        made = self._inner(*given[0], **given[1])
        return self._after(given, made, *args, **kwargs)

    def _until_reached(self, *args: Any, **kwargs: Any) -> Any:
        def reached(*own_args: Any, **own_kwargs: Any) -> Any:
            raise _ReachedError((own_args, own_kwargs))

        try:
            with _forward_of(self._inner, reached):
                self.original(*args, **kwargs)
        except _ReachedError as end:
            return end.given
        raise self._untraceable(f"it does not call '{self._part.around}'")

    def _with_result(self, given: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
        calls: list[Any] = []

        def answered(*own_args: Any, **own_kwargs: Any) -> Any:
            calls.append((own_args, own_kwargs))
            return made

        with _forward_of(self._inner, answered):
            result = self.original(*args, **kwargs)
        if len(calls) != 1:
            raise self._untraceable(f"it calls '{self._part.around}' {len(calls)} times")
        if not _alike(calls[0], given):
            raise self._other_tensors(calls[0], self._until_reached(*args, **kwargs))
        return result

    def _other_tensors(self, second: Any, again: Any) -> CaptureError:
        """Why the sub-module was called with other tensors in the second run than those that came to it.

        Args:
            second: what it was called with there.
            again: what it is called with once more.
        """
        if _alike(again, second):
            what = f"rows of what '{self._part.around}' is called with do not lie as those of the batch do"
            return self._untraceable(f"{what}: several batches are joined, say, or rows change places")
        return CaptureError(
            f"{self._part} runs twice, and has called it with other tensors the second time, as what draws random "
            "numbers does: draw them before the model is called, or allow_uncut=True runs all in one piece"
        )


class _Side(WholeCall):
    """One of the two runs."""

    advice = ", or RaNNCModule(..., allow_uncut=True) keeps the whole model in one piece, for batches of any form"

    def __init__(self, model: nn.Module, part: Part, trials: Trials, run: Callable[..., Any]) -> None:
        super().__init__(model, part, trials)
        self.original = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """An opaque Op."""
        return self._traced(*args, **kwargs)

    def _examine(self, tried: Tried) -> None:
        if tried.writes:
            raise self._untraceable("it changes a tensor that it is called with in place, and would twice")


class _Before(_Side):
    suffix = ",before"
    hands_on = True

    def _examine(self, tried: Tried) -> None:
        super()._examine(tried)
        if tried.changes:
            raise self._untraceable(f"it changes buffers before '{self._part.around}' is called, and would twice")
        if tried.row_wise is False:
            raise self._untraceable(f"rows of what '{self._part.around}' is called with depend on other rows")


class _After(_Side):
    suffix = ",after"


@contextmanager
def _forward_of(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    own = vars(module)
    had_own, before = "forward" in own, own.get("forward")
    own["forward"] = run
    try:
        yield
    finally:
        del own["forward"]
        if had_own:
            own["forward"] = before


def _alike(found: Any, expected: Any) -> bool:
    (mine, structure), (theirs, other) = flatten(found), flatten(expected)
    return structure == other and all(map(_close, mine, theirs))


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    return torch.allclose(found.detach(), expected.detach(), rtol=0.0, atol=_RELATIVE * scale, equal_nan=True)


def whole_call(model: nn.Module, part: Part, trials: Trials) -> WholeCall:
    """What makes calls of a part opaque."""
    return CallAround(model, part, trials) if part.around else WholeCall(model, part, trials)
