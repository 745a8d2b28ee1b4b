"""Whether gradients are recorded, as a forward asks it: a trace records them always, the call perhaps not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.facts import FACTS
from pyrannc.capture.reads.user_names import replaced_for_users
from pyrannc.capture.torch_internals.patching import GRAD_SWITCHES, IS_GRAD_ENABLED, fake_told_of_gradients
from pyrannc.capture.torch_internals.tracing import current_tracer, note_new_nodes, proxy_of
from pyrannc.capture.user.source import belongs_to_user

_RECORDED = "rannc_recorded"
"""In the ``meta`` of nodes: the call records gradients where it makes them."""


class GradMode:
    """Answers code of the user as the call would, and notes that it has asked.

    Attributes:
        enabled: the call records gradients.
        asked: the model has asked whether it does.
    """

    def __init__(self) -> None:
        self.enabled = torch.is_grad_enabled()
        self.asked = False
        self._now = self.enabled
        self._ever = self.enabled
        self._before: dict[int, list[bool]] = {}

    def note_nodes_of(self, graph: fx.Graph) -> None:
        """From now on, every node made in ``graph`` tells whether the call records gradients there."""

        def note(node: fx.Node) -> None:
            node.meta[_RECORDED] = self._now

        note_new_nodes(graph, note)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While active, in the trace of the call."""
        real: Callable[[], bool] = IS_GRAD_ENABLED.original
        own = threading.get_ident()
        is_leaf: Any = Tensor.is_leaf

        def is_grad_enabled() -> bool:
            asks = threading.get_ident() == own and _asks(sys._getframe(1))
            return self._answer(self._now and real()) if asks else real()

        def told(otherwise: Any) -> Callable[[Tensor, Any], Any]:
            """What is true of a result; in a call that has recorded nothing, ``otherwise``."""

            def answer(tensor: Tensor, found: Any) -> Any:
                asks = found is not otherwise and not is_leaf.__get__(tensor) and _asks(sys._getframe(2))
                return otherwise if asks and not self._answer(self._has_history(tensor)) else found

            return answer

        with ExitStack() as stack:
            stack.enter_context(replaced_for_users(real, is_grad_enabled, IS_GRAD_ENABLED))
            answers = {"requires_grad": told(False), "grad_fn": told(None), "is_leaf": told(True)}
            stack.enter_context(fake_told_of_gradients(answers))
            for enter, leave, mode in GRAD_SWITCHES:
                stack.enter_context(enter.replaced_by(self._switching(enter.original, own, mode)))
                stack.enter_context(leave.replaced_by(self._switching_back(leave.original, own)))
            yield

    def _has_history(self, tensor: Tensor) -> bool:
        """Of a result that has one in the trace: whether the call records how it is made."""
        if self.enabled or not self._ever:
            return self._ever
        tracer = current_tracer()
        proxy = None if tracer is None else proxy_of(tensor, tracer)
        return self._ever if proxy is None else _is_recorded(proxy.node)

    def _answer(self, told: bool) -> bool:
        self.asked = True
        return told

    def _switching(self, original: Callable[..., Any], own: int, mode: bool | None) -> Callable[..., Any]:
        """What switches the mode, to that which it is given where ``mode`` is None."""

        def switch(switcher: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == own and _asks(sys._getframe(1)):
                self._before.setdefault(id(switcher), []).append(self._now)
                self._now = mode if mode is not None else bool([*args, *kwargs.values()][0])
                self._ever |= self._now
            return original(switcher, *args, **kwargs)

        return switch

    def _switching_back(self, original: Callable[..., Any], own: int) -> Callable[..., Any]:
        def switch_back(switcher: Any, *args: Any) -> Any:
            if threading.get_ident() == own and (before := self._before.get(id(switcher))):
                self._now = before.pop()
            return original(switcher, *args)

        return switch_back


def _is_recorded(node: fx.Node) -> bool:
    """True where the call records gradients on some way from a tensor that requires them to a node's result."""
    left, seen = [node], {node}
    while left:
        current = left.pop()
        if not _requires_grad(current):
            continue
        if current.op != "call_function":
            return True
        if current.meta.get(_RECORDED, True):
            new = [operand for operand in current.all_input_nodes if operand not in seen]
            seen.update(new)
            left += new
    return False


def _requires_grad(node: fx.Node) -> bool:
    facts = node.meta.get(FACTS)
    return facts is None or any(found.requires_grad for found in facts.values())


def _asks(frame: FrameType) -> bool:
    """True for code of the user, and for what torch puts round a function that a switch decorates."""
    return belongs_to_user(frame.f_code.co_filename) or frame.f_code.co_name == "decorate_context"
