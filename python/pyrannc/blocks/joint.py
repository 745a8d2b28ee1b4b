"""A Span's forward and backward as two graphs of ATen operators, without autograd and without changes in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.blocks.form import Form, Meta
from pyrannc.blocks.graphs import (
    NotCompilable,
    behind,
    copied,
    keep_arguments_whole,
    named,
    results_in,
    take_changes_out,
)
from pyrannc.blocks.lifted import Lifted
from pyrannc.blocks.randomness import Randomness
from pyrannc.capture.nodes.ops import draws_random_numbers
from pyrannc.capture.torch_internals.compiler import (
    memory_budget,
    mode_of_known_sizes,
    operators_below_autograd,
    parted,
    without_changes,
)
from pyrannc.capture.torch_internals.fakes import FakeTensorMode
from pyrannc.capture.torch_internals.operators import OpOverload, schema
from pyrannc.capture.torch_internals.tensors import storage_address


@dataclass(frozen=True)
class Given:
    """What a result of the function is.

    Attributes:
        place: of the forward's results, or of what comes in if ``taken``.
        taken: it is what came in.
        meta: what it is like.
    """

    place: int
    taken: bool
    meta: Meta


@dataclass(frozen=True)
class Ends:
    """What goes into a form's forward and backward, and what comes out of them.

    Attributes:
        given: by result of the function.
        made: the results that the forward makes.
        changed: by place of what comes in, what is changed.
        wanted: places of the made results that a gradient comes back for.
        differentiated: places of what comes in that gets gradients.
    """

    given: tuple[Given, ...]
    made: tuple[Meta, ...]
    changed: tuple[int, ...]
    wanted: tuple[int, ...]
    differentiated: tuple[int, ...]


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a form.

    Attributes:
        mode: of the tensors in the graphs.
        forward: takes what the Span takes, then what is drawn; gives what is made, new contents of what is changed, and
            what is kept for the backward.
        backward: takes what is kept, then gradients of what is wanted; gives those of what is differentiated. None
            without a backward.
        whole: both in one, before they are parted: what came in and the gradients to results and gradients.
        lifted: what is drawn.
    """

    mode: FakeTensorMode
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    whole: fx.GraphModule
    ends: Ends
    lifted: Lifted


@dataclass(frozen=True)
class Seen:
    """What a run without data has shown.

    Attributes:
        lifted: what is drawn.
        gives: what the function gives.
        taken: by result, the place of what came in if that is handed through.
    """

    lifted: Lifted
    gives: tuple[Meta, ...]
    taken: tuple[int | None, ...]


def results_of(found: Any) -> tuple[Tensor, ...]:
    """What a Span gives, which is one Value by itself."""
    return found if isinstance(found, tuple) else (found,)


def see(call: Callable[..., Any], form: Form, numbers: int, randomness: Randomness, device: torch.device) -> Seen:
    """Runs a Span's function on tensors without data.

    Raises:
        Exception: torch cannot.
    """
    lifted = Lifted()
    randomness.at([(0, form.rows)] if form.rows else [])
    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(form.trains), lifted.noted(randomness):
        takes = [meta.empty(device) for meta in form.takes]
        results = results_of(call(form.rows, *range(numbers), *takes))
        taken = [next((place for place, leaf in enumerate(takes) if leaf is result), None) for result in results]
        return Seen(lifted, tuple(map(Meta.of, results)), tuple(taken))


def trace(
    call: Callable[..., Any], form: Form, numbers: int, seen: Seen, randomness: Randomness, device: torch.device
) -> Joint:
    """Forward and backward of a Span.

    Raises:
        NotCompilable: it does what these cannot hold.
        Exception: torch cannot trace it.
    """
    mode = mode_of_known_sizes()
    with mode:
        takes = [meta._replace(requires_grad=False).empty(device) for meta in form.takes]
        drawn = seen.lifted.empty(device)
    roots = [
        place
        for place, meta in enumerate(seen.gives)
        if meta.requires_grad and form.wanted[place] and seen.taken[place] is None
    ]
    with mode:
        tangents = [seen.gives[place]._replace(requires_grad=False).empty(device) for place in roots]
    arguments = [*takes, *drawn, *tangents]
    tracing = _Tracing(call, form, numbers, seen, randomness, roots)
    graph = without_changes(operators_below_autograd(tracing.run, arguments, mode), arguments, mode)
    names = [f"primals_{place}" for place in range(len(takes) + len(drawn))]
    graph = named(graph, [*names, *(f"tangents_{place}" for place in range(len(tangents)))])
    changed = take_changes_out(graph, len(tracing.made), len(takes))
    _refuse(graph, seen.lifted)
    if any(form.takes[place].requires_grad for place in changed):
        raise NotCompilable("it changes in place what gradients go to")
    results = len(tracing.made) + len(changed)
    trains = bool(roots and tracing.differentiated)
    if trains:
        forward, backward = _parted(graph, results, mode)
        if _drawing(backward):
            raise NotCompilable("its backward would draw random numbers again")
        keep_arguments_whole(forward, backward, results)
    ends = Ends(
        given=tuple(tracing.given),
        made=tuple(given.meta for given in tracing.given if not given.taken),
        changed=tuple(changed),
        wanted=tuple(tracing.given[place].place for place in roots) if trains else (),
        differentiated=tuple(tracing.differentiated) if trains else (),
    )
    return Joint(
        mode=mode,
        forward=forward if trains else graph,
        backward=backward if trains else None,
        whole=graph,
        ends=ends,
        lifted=seen.lifted,
    )


class _Tracing:
    """The function that is traced: a forward and its backward.

    Args:
        roots: places of the results that a gradient comes back for.

    Attributes:
        given: by result of the Span.
        made: what the forward makes.
        differentiated: places of what gets gradients.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        form: Form,
        numbers: int,
        seen: Seen,
        randomness: Randomness,
        roots: Sequence[int],
    ) -> None:
        self._call, self._form, self._numbers, self._seen = call, form, numbers, seen
        self._randomness, self._roots = randomness, roots
        self.given: list[Given] = []
        self.made: list[Tensor] = []
        self.differentiated: list[int] = []

    def run(self, *arguments: Tensor) -> list[Tensor]:
        """What the Span takes, what it draws, and gradients of the roots, to what it makes and gradients."""
        inputs = len(self._form.takes)
        draws = inputs + len(self._seen.lifted.draws)
        drawn, tangents = arguments[inputs:draws], arguments[draws:]
        leaves = [
            tensor.detach().requires_grad_(meta.requires_grad)
            for tensor, meta in zip(arguments[:inputs], self._form.takes, strict=True)
        ]
        with torch.set_grad_enabled(self._form.trains), self._seen.lifted.given(self._randomness, drawn):
            results = results_of(self._call(self._form.rows, *range(self._numbers), *leaves))
        if tuple(map(Meta.of, results)) != self._seen.gives:
            raise NotCompilable("it gives other results each time")
        grads = self._gradients([results[place] for place in self._roots], leaves, tangents)
        self._set_apart(results, leaves)
        return [*(tensor.detach() for tensor in self.made), *grads]

    def _gradients(self, roots: Sequence[Tensor], leaves: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        sources = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        if not roots or not sources:
            return []
        found = torch.autograd.grad(roots, [leaves[place] for place in sources], tangents, allow_unused=True)
        self.differentiated = [place for place, grad in zip(sources, found, strict=True) if grad is not None]
        return [grad for grad in found if grad is not None]

    def _set_apart(self, results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """What is made gets memory of its own."""
        memory = {storage_address(leaf.untyped_storage()) for leaf in leaves}
        for result, taken, meta in zip(results, self._seen.taken, self._seen.gives, strict=True):
            if taken is not None:
                self.given.append(Given(taken, True, meta))
                continue
            address = storage_address(result.untyped_storage())
            own = result.clone() if address in memory else result
            memory.add(address)
            self.given.append(Given(len(self.made), False, meta._replace(stride=own.stride())))
            self.made.append(own)


def _parted(graph: fx.GraphModule, results: int, mode: FakeTensorMode) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward; what draws is in the forward alone."""
    whole = copied(graph)
    forward, backward = parted(whole, results, mode, once=_drawing(whole))
    kept = results_in(forward)[results:]
    if all(isinstance(node.meta["val"], Tensor) for node in kept):
        return forward, backward
    # With a memory budget torch may keep all results of an Op as one, which no code can take.
    whole = copied(graph)
    with memory_budget(100):
        return parted(whole, results, mode, once=_drawing(whole))


def _drawing(graph: fx.GraphModule) -> list[fx.Node]:
    """Ops that draw from the device's generator."""
    operators = (node for node in graph.graph.nodes if isinstance(node.target, OpOverload))
    return [node for node in operators if draws_random_numbers(node)]


def _refuse(graph: fx.GraphModule, lifted: Lifted) -> None:
    """Raises for Ops whose effects or numbers would be others in compiled code."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__module__", "") == "_operator":
            continue
        if not isinstance(node.target, OpOverload) or node.target.namespace not in ("aten", "prims"):
            raise NotCompilable(f"{node.target} is not an operator of torch")
        own = schema(node.target)
        if not own.returns or own.is_mutable:
            raise NotCompilable(f"{node.target} has effects beside its results")
    drawing = _drawing(graph)
    if len(drawing) != len(lifted.placed):
        raise NotCompilable("it sets the generator otherwise than its Ops draw from it")
    # No compiler can exchange Ops of which one needs what the other gives.
    if not all(before in behind([node]) for before, node in pairwise(drawing)):
        raise NotCompilable("Ops that do not wait for one another draw from the device's generator")
