"""A function that an operator is given, such as a branch of ``torch.cond``, as a graph of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyrannc.capture.nodes.autocast import Autocast
from pyrannc.capture.nodes.facts import PLACE, memory
from pyrannc.capture.nodes.leaf import OpaqueCall
from pyrannc.capture.nodes.one_call import as_one_function
from pyrannc.capture.nodes.operands import written_memory
from pyrannc.capture.nodes.ops import draws_random_numbers
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.torch_internals.levels import functorch_is_active
from pyrannc.capture.torch_internals.symbols import SYMBOLIC
from pyrannc.capture.torch_internals.tracing import disable_proxy_modes_tracing, proxy_of
from pyrannc.capture.user.flatten import Structure, flatten
from pyrannc.capture.user.source import Place, SourceTracker


@dataclass(frozen=True)
class InnerGraph:
    """A function of tensors.

    Attributes:
        module: takes its operands, then what it reads of others; gives a tuple of tensors. It runs with autocast off,
            as every conversion is one of its operators.
        digest: of all that it does, as far as ``is_known``.
        reads: those others.
        results: what it gave, without data.
        output: what stands round the results.
        is_known: no code of others is in it.
    """

    module: fx.GraphModule
    digest: str
    reads: tuple[fx.Node, ...]
    results: tuple[Tensor, ...]
    output: Structure
    is_known: bool

    @property
    def call(self) -> Callable[..., tuple[Tensor, ...]]:
        """The module's code, without its hooks."""
        return self.module.forward


def inner_graph(
    function: Callable[..., Any], operands: Sequence[Tensor], tracer: Any, tracker: SourceTracker
) -> InnerGraph:
    """Traces a function, and takes what it does out of the trace.

    Args:
        operands: that it is tried with; each comes to it as a tensor of its own.

    Raises:
        UntraceableError: it does what would show outside of it, or draws random numbers.
    """
    cut = _Cut(tracer, tracker)
    entered = [operand.clone() for operand in operands]
    results, output = flatten(function(*entered))
    if not results or not all(isinstance(item, Tensor) and proxy_of(item, tracer) is not None for item in results):
        raise cut.untraceable("gives something else than tensors that it computes")
    own = [cut.node_of(item) for item in entered]
    given = cut.distinct_from_outside(results, own)
    group, reads = cut.parted(own)
    cut.refuse_effects(group, [*own, *reads])
    module, digest = as_one_function(group, [*own, *reads], given, results[0].device)
    for node in reversed([*own, *group]):
        tracer.graph.erase_node(node)
    unknown = (node for node in group if isinstance(node.target, OpaqueCall) and not node.target.is_known)
    return InnerGraph(module, digest, tuple(reads), tuple(results), output, next(unknown, None) is None)


class _Cut:
    """What has been added to a trace since."""

    def __init__(self, tracer: Any, tracker: SourceTracker) -> None:
        self._tracer = tracer
        self._place = tracker.here()
        self._last = next(iter(reversed(tracer.graph.nodes)))

    def node_of(self, item: Tensor) -> fx.Node:
        proxy = proxy_of(item, self._tracer)
        assert proxy is not None, "it is traced"
        return proxy.node

    def distinct_from_outside(self, results: Sequence[Tensor], own: Sequence[fx.Node]) -> list[fx.Node]:
        """The results' nodes, of copies where a result is in the memory of what comes in."""
        new = set(self._added())
        outside = {
            storage for node in new for item in node.all_input_nodes if item not in new for storage in memory(item)
        }
        outside.update(storage for node in own for storage in memory(node))
        nodes: list[fx.Node] = []
        for result in results:
            node = self.node_of(result)
            is_new = node in new and node.op == "call_function" and node not in (*own, *nodes)
            is_own = is_new and not memory(node) & outside
            nodes.append(node if is_own else self.node_of(result.clone()))
        return nodes

    def parted(self, own: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """What is done inside, and what that reads from outside: constants and sizes that others tell, too."""
        inside = dict.fromkeys(own)
        group: list[fx.Node] = []
        for node in self._added():
            if node in inside or node.op != "call_function":
                continue
            is_size = isinstance(node.meta.get("val"), SYMBOLIC)
            if not is_size or any(operand in inside for operand in node.all_input_nodes):
                inside[node] = None
                group.append(node)
        read = (operand for node in group for operand in node.all_input_nodes if operand not in inside)
        return group, list(dict.fromkeys(read))

    def refuse_effects(self, group: Sequence[fx.Node], taken: Sequence[fx.Node]) -> None:
        """Raises UntraceableError for what more than the results shows."""
        outside = {storage for node in taken for storage in memory(node)}
        if any(written_memory(node) & outside for node in group):
            raise self.untraceable("changes in place what it is given")
        if any(map(draws_random_numbers, group)):
            raise self.untraceable("draws random numbers")

    def untraceable(self, what: str) -> UntraceableError:
        cause = f"a function that an operator such as torch.cond is given {what}"
        return UntraceableError(f"{self._place}: {cause}", self._place, cause)

    def _added(self) -> list[fx.Node]:
        added: list[fx.Node] = []
        node = self._last.next
        while node.op != "root":
            added.append(node)
            node = node.next
        return added


def refuse_transforms(name: str, tracker: SourceTracker) -> None:
    """Raises UntraceableError for an operator with functions inside of ``torch.vmap`` and the like."""
    if functorch_is_active():
        here, cause = tracker.here(), f"{name} is called inside of torch.vmap or the like"
        raise UntraceableError(f"{here}: {cause}", here, cause)


def empty_like(item: Tensor, *, requires_grad: bool) -> Tensor:
    """A tensor without data that no node stands for, laid out like another one; with gradients as computed ones are."""
    with disable_proxy_modes_tracing(), item.fake_mode, torch.enable_grad():  # type: ignore[attr-defined]  # all of a trace are fake
        made = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
        if requires_grad and (made.is_floating_point() or made.is_complex()):
            made = made.requires_grad_().clone()
        return made


def refuse_lost(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    """Raises UntraceableError where something uses what a function that was taken out of a trace has computed."""
    known = set(graph.nodes)
    users = (node for node in graph.nodes if not known.issuperset(node.all_input_nodes))
    place = next((node.meta[PLACE] for node in users), None if known.issuperset(results) else Place(""))
    if place is not None:
        cause = "a function that an operator such as torch.cond is given hands on more than its result"
        raise UntraceableError(f"{place}: {cause}", place, cause)


def operator_of(name: str, said: Sequence[Any], parts: Sequence[InnerGraph], run: Callable[..., Any]) -> OpaqueCall:
    """The target of an operator with functions; ``said``: what else tells what it does."""
    digest = hashlib.sha256(repr(([part.digest for part in parts], said)).encode()).hexdigest()[:12]
    target = OpaqueCall(f"{name}_{digest}", run, f"{name}.{digest}")
    target.draws = False
    target.autocast = Autocast((), cache=True)
    if all(part.is_known for part in parts):
        target.title = target.does = f"torch.{name}.{digest}"
        target.is_known = True
    return target
