"""``torch.cond`` and ``torch.while_loop``: each is one Op, with the functions that it is given as graphs of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from pyrannc.capture.nodes.fallback import argument_of, insert_node
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.torch_internals.patching import COMPILE, COND, WHILE_LOOP
from pyrannc.capture.torch_internals.tracing import current_tracer
from pyrannc.capture.user.source import SourceTracker

from .inner_graph import InnerGraph, empty_like, inner_graph, operator_of, refuse_transforms
from .plain_control_flow import plain_cond, plain_while_loop, reaching


@contextmanager
def control_flow_as_ops(tracker: SourceTracker) -> Iterator[None]:
    """Branches and loops of tensors become Ops while active, instead of being compiled."""

    def cond(self: Any, pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Tensor]) -> Any:
        tracer = current_tracer()
        if tracer is None or not isinstance(pred, Tensor):
            return plain_cond(pred, true_fn, false_fn, operands)
        refuse_transforms("an operator such as torch.cond", tracker)
        return _Branches(tracer, tracker).of(pred, true_fn, false_fn, operands)

    def while_loop(self: Any, cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return plain_while_loop(cond_fn, body_fn, carried, additional)
        refuse_transforms("an operator such as torch.cond", tracker)
        if not all(isinstance(item, Tensor) for item in carried):
            raise _untraceable(tracker, "carries a Python number from turn to turn")
        return _Turns(tracer, tracker).of(cond_fn, body_fn, carried)

    with ExitStack() as stack:
        for point, new in ((COMPILE, _as_it_is), (COND, cond), (WHILE_LOOP, while_loop)):
            stack.enter_context(point.replaced_by(new))
        yield


def _as_it_is(model: Any = None, **_options: Any) -> Any:
    """In the place of ``torch.compile``, which changes nothing but speed."""
    return (lambda function: function) if model is None else model


class _Branches:
    """Calls of ``torch.cond``."""

    def __init__(self, tracer: Any, tracker: SourceTracker) -> None:
        self._tracer = tracer
        self._tracker = tracker

    def of(self, pred: Tensor, true_fn: Any, false_fn: Any, operands: Sequence[Tensor]) -> Any:
        """Traces both branches, and returns what stands for the results."""
        parts = [inner_graph(function, operands, self._tracer, self._tracker) for function in (true_fn, false_fn)]
        first, second = parts
        if first.output != second.output or list(map(_form, first.results)) != list(map(_form, second.results)):
            raise _untraceable(self._tracker, "has branches that give tensors of other shapes or types")
        own = [argument_of(item, self._tracer) for item in operands]
        arguments, places = _joined(own, parts, self._tracer)
        calls = [_placed(part, found) for part, found in zip(parts, places, strict=True)]

        def run(pred: Tensor, *tensors: Any) -> Any:
            chosen = 0 if bool(pred) else 1
            idle = [item for place, item in enumerate(tensors) if place not in places[chosen]]
            return reaching(calls[chosen](tensors), idle)

        def both(pred: Tensor, *tensors: Any) -> Any:
            return tuple(item for call in calls for item in call(tensors))

        target = operator_of("cond", (), parts, run)
        target.tried = both
        wants = [any(part.results[place].requires_grad for part in parts) for place in range(len(first.results))]
        fakes = tuple(empty_like(item, requires_grad=want) for item, want in zip(first.results, wants, strict=True))
        insert_node(self._tracer, target, (argument_of(pred, self._tracer), *arguments), {}, fakes)
        return first.output.rebuild(fakes)


class _Turns:
    """Calls of ``torch.while_loop``."""

    def __init__(self, tracer: Any, tracker: SourceTracker) -> None:
        self._tracer = tracer
        self._tracker = tracker

    def of(self, cond_fn: Any, body_fn: Any, carried: Sequence[Tensor]) -> Any:
        """Traces the question and one turn, and returns what stands for the results."""
        parts = [inner_graph(function, carried, self._tracer, self._tracker) for function in (cond_fn, body_fn)]
        if list(map(_form, parts[1].results)) != list(map(_form, carried)):
            raise _untraceable(self._tracker, "has a body that gives tensors of other shapes or types than it is given")
        own = [argument_of(item, self._tracer) for item in carried]
        arguments, places = _joined(own, parts, self._tracer)
        test, body = (_placed(part, found) for part, found in zip(parts, places, strict=True))
        count = len(carried)

        def run(*tensors: Any) -> Any:
            found, reads = tensors[:count], tensors[count:]
            turns = 0
            while bool(test((*found, *reads))[0]):
                found = body((*found, *reads))
                turns += 1
            idle = [item for item in reads if not turns]
            return reaching(tuple(item if turns else item.clone() for item in found), idle)

        target = operator_of("while_loop", (), parts, run)
        wants = any(item.requires_grad for item in (*carried, *parts[1].results))
        fakes = tuple(empty_like(item, requires_grad=wants) for item in carried)
        insert_node(self._tracer, target, arguments, {}, fakes)
        return fakes


def _joined(own: Sequence[Any], parts: Sequence[InnerGraph], tracer: Any) -> tuple[tuple[Any, ...], list[list[int]]]:
    """What an operator takes, its operands first, and by part the places of what that takes."""
    reads = dict.fromkeys(node for part in parts for node in part.reads)
    number = {node: len(own) + place for place, node in enumerate(reads)}
    places = [[*range(len(own)), *(number[node] for node in part.reads)] for part in parts]
    return (*own, *map(tracer.proxy, reads)), places


def _placed(part: InnerGraph, places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Tensor, ...]]:
    def call(tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        return part.call(*[tensors[place] for place in places])

    return call


def _form(item: Tensor) -> tuple[Any, ...]:
    return tuple(item.shape), item.dtype, item.device


def _untraceable(tracker: SourceTracker, what: str) -> UntraceableError:
    here, cause = tracker.here(), f"an operator such as torch.cond {what}"
    return UntraceableError(f"{here}: {cause}", here, cause)
