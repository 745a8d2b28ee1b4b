"""Whether gradients are recorded, as a forward asks it: a trace records them always, the call perhaps not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .source import belongs_to_user
from .torch_internals.operators import SET_GRAD_ENABLED
from .torch_internals.patching import IS_GRAD_ENABLED, fake_requires_grad
from .torch_internals.tracing import current_tracer


class GradMode:
    """Answers code of the user as the call would, and notes that it has asked.

    Attributes:
        enabled: the call records gradients.
        asked: the model has asked whether it does.
    """

    def __init__(self) -> None:
        self.enabled = torch.is_grad_enabled()
        self.asked = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While active, in the trace of the call."""
        real: Callable[[], bool] = IS_GRAD_ENABLED.original
        own = threading.get_ident()

        def is_grad_enabled() -> bool:
            asks = threading.get_ident() == own and _asks(sys._getframe(1))
            return self._answer(real()) if asks else real()

        def requires_grad(tensor: Tensor, required: bool) -> bool:
            asks = required and not tensor.is_leaf and _asks(sys._getframe(2))
            return self._answer(required) if asks else required

        with IS_GRAD_ENABLED.replaced_by(is_grad_enabled), fake_requires_grad(requires_grad):
            yield

    def _answer(self, in_trace: bool) -> bool:
        if not in_trace:
            return False
        self.asked = True
        return self.enabled or _enabled_inside()


def _asks(frame: FrameType) -> bool:
    return belongs_to_user(frame.f_code.co_filename)


def _enabled_inside() -> bool:
    """True inside of the forward's own ``torch.enable_grad()``."""
    tracer: Any = current_tracer()
    switches = tracer.graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED)
    return sum(1 if node.args[0] else -1 for node in switches) > 0
