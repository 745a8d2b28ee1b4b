"""From a raw trace to a flat graph of named placeholders, ops and one tuple of outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pyrannc.capture.nodes.autocast import OF_ONE_OP, join_casts
from pyrannc.capture.nodes.dims import Dim
from pyrannc.capture.nodes.facts import FACTS, GRAD_ENABLED, PLACE
from pyrannc.capture.nodes.ops import has_effect, is_assertion, is_tuple_access, takes_form_alone
from pyrannc.capture.nodes.untraceable import UntraceableError
from pyrannc.capture.torch_internals.operators import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_ENABLED
from pyrannc.capture.torch_internals.symbols import SYMBOLIC, expression
from pyrannc.capture.torch_internals.tracing import LazyGraphModule
from pyrannc.capture.trace.tracer import Trace
from pyrannc.capture.user.source import Place
from pyrannc.errors import CaptureError

from .copied_input import copy_input
from .data_dependent import keep_together
from .expanded_slices import drop_expanded_slices
from .functional import replace_in_place_ops
from .layouts import pin_layouts
from .lookups import join_lookups
from .mean_losses import divide_mean_losses
from .merged_rows import keep_rows_apart
from .plain_masks import drop_plain_masks
from .reciprocals import divide_by_rows
from .whole_slices import drop_whole_slices


@dataclass
class CleanGraph:
    """The graph that is lowered, and its nodes by role."""

    gm: fx.GraphModule
    params: list[fx.Node] = field(default_factory=list)
    buffers: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    constants: list[fx.Node] = field(default_factory=list)
    ops: list[fx.Node] = field(default_factory=list)
    dims: dict[fx.Node, Dim] = field(default_factory=dict)
    outputs: list[fx.Node] = field(default_factory=list)
    updates: dict[int, fx.Node] = field(default_factory=dict)


def place_of(node: fx.Node) -> Place:
    """Where the model made the node."""
    place = node.meta.get(PLACE)
    return place if isinstance(place, Place) else Place("")


def grad_enabled(node: fx.Node) -> bool:
    """True when gradients were on where the model made the node, and may pass through it."""
    return bool(node.meta.get(GRAD_ENABLED, True)) and not takes_form_alone(node)


def clean(trace: Trace, *, apart: bool = False) -> CleanGraph:
    """Flattens the placeholders, drops what no run needs, and sorts nodes into roles: all of :data:`PASSES`, in order.

    Args:
        trace: of a call.
        apart: an input with rows is copied first.

    Raises:
        CaptureError: an integer argument is not affine in the batch size.
    """
    cleaned = CleanGraph(gm=LazyGraphModule(torch.nn.Module(), fx.Graph()))
    for run in PASSES:
        run(trace, cleaned)
    copied = copy_input(cleaned.gm.graph, cleaned.inputs, trace.reader) if apart else None
    cleaned.ops[:0] = [] if copied is None else [copied]
    # Making a GraphModule keeps the graph's nodes, so the lists of nodes stay valid.
    cleaned.gm = LazyGraphModule(cleaned.gm, cleaned.gm.graph, class_name="Captured")
    return cleaned


def drop_unused_in_trace(trace: Trace, cleaned: CleanGraph) -> None:
    """Ops of the trace whose results nobody reads."""
    trace.gm.graph.eliminate_dead_code(is_impure_node=has_effect)


def copy_what_runs(trace: Trace, cleaned: CleanGraph) -> None:
    """Without switches of the gradient mode, assertions and idle ``detach_``."""
    graph, env = cleaned.gm.graph, dict[fx.Node, fx.Node]()
    _copy_placeholders(trace, graph, env, cleaned)
    for node in trace.gm.graph.nodes:
        if node.op == "get_attr":
            _copy_constant(node, trace.gm, graph, env, cleaned)
        elif _is_idle_detach(node):
            env[node] = env[node.args[0]]
        elif node.op == "call_function" and not _is_for_trace_only(node):
            env[node] = graph.node_copy(node, lambda old: env[old])
            env[node].meta = node.meta
    _copy_outputs(trace, graph, env, cleaned)


def take_wholes(trace: Trace, cleaned: CleanGraph) -> None:
    """Slices of a whole dimension, and those of one that was expanded, which are what they are of."""
    drop_whole_slices(cleaned.gm.graph, trace.reader.read)
    drop_expanded_slices(cleaned.gm.graph, trace.reader.read)


def make_functional(trace: Trace, cleaned: CleanGraph) -> None:
    """In-place Ops, where the model cannot tell the difference."""
    replace_in_place_ops(cleaned.gm.graph, {*cleaned.params, *cleaned.buffers, *cleaned.constants})


def convert_once(trace: Trace, cleaned: CleanGraph) -> None:
    """Conversions of a parameter without gradients."""
    pairs = zip(cleaned.params, trace.params.tensors, strict=True)
    join_casts(cleaned.gm.graph, [node for node, param in pairs if not param.requires_grad])


def drop_unused(trace: Trace, cleaned: CleanGraph) -> None:
    """Ops whose results nobody reads any more."""
    cleaned.gm.graph.eliminate_dead_code(is_impure_node=has_effect)


def keep_data_dependent(trace: Trace, cleaned: CleanGraph) -> None:
    """Ops among which extents or numbers depend on data become one."""
    keep_together(cleaned.gm.graph, cleaned.inputs, trace.reader, trace.device)
    _outputs_again(cleaned)


def keep_lookups(trace: Trace, cleaned: CleanGraph) -> None:
    """What looks up elements by their numbers inside of ``torch.vmap`` becomes one Op with what makes the numbers."""
    join_lookups(cleaned.gm.graph, trace.reader, trace.device)
    cleaned.gm.graph.eliminate_dead_code(is_impure_node=has_effect)
    _outputs_again(cleaned)


def divide_means(trace: Trace, cleaned: CleanGraph) -> None:
    """Losses averaged over targets that are not ignored become sums by counts."""
    divide_mean_losses(cleaned.gm.graph)
    _outputs_again(cleaned)


def _outputs_again(cleaned: CleanGraph) -> None:
    results: Any = cleaned.gm.graph.output_node().args[0]
    cleaned.outputs = list(results[: len(cleaned.outputs)])
    cleaned.updates = dict(zip(cleaned.updates, results[len(cleaned.outputs) :], strict=True))


def _is_for_trace_only(node: fx.Node) -> bool:
    """True for switches that have done their work while the model was traced, and for assertions."""
    if node.target in (ENTER_AUTOCAST, EXIT_AUTOCAST):
        return OF_ONE_OP not in node.meta
    return node.target is SET_GRAD_ENABLED or is_assertion(node)


def _is_idle_detach(node: fx.Node) -> bool:
    """True for ``detach_`` of a tensor without gradient, which ``torch.tensor`` adds."""
    if node.target is not torch.ops.aten.detach_.default or not isinstance(node.args[0], fx.Node):
        return False
    facts = node.args[0].meta.get(FACTS, {}).get(None)
    return facts is not None and not facts.requires_grad


def _copy_placeholders(trace: Trace, graph: fx.Graph, env: dict[fx.Node, fx.Node], cleaned: CleanGraph) -> None:
    names = [f"p_{_identifier(name)}" for name in trace.params.names]
    names += [f"b_{_identifier(name)}" for name in trace.buffers.names]
    names += [f"x_{index}" for index in range(len(trace.inputs))]
    roles = [cleaned.params] * len(trace.params.names) + [cleaned.buffers] * len(trace.buffers.names)
    roles += [cleaned.inputs] * len(trace.inputs)
    placeholders = [node for node in trace.gm.graph.nodes if node.op == "placeholder"]
    for node, name, role in zip(placeholders, names, roles, strict=True):
        env[node] = graph.placeholder(name)
        env[node].meta = node.meta
        role.append(env[node])


def _copy_constant(
    node: fx.Node, owner: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, fx.Node], cleaned: CleanGraph
) -> None:
    target = str(node.target)
    known = next((constant for constant in cleaned.constants if constant.target == target), None)
    if known is None:
        value: Any = owner
        for name in target.split("."):
            value = getattr(value, name)
        if not isinstance(value, torch.Tensor):
            cause = "it calls an operator with a graph of its own (cond, while_loop, ...)"
            raise UntraceableError(f"{place_of(node)}: {cause}", place_of(node), cause)
        cleaned.gm.register_buffer(target, value, persistent=False)
        known = graph.get_attr(target)
        known.meta = node.meta
        cleaned.constants.append(known)
    env[node] = known


def _copy_outputs(trace: Trace, graph: fx.Graph, env: dict[fx.Node, fx.Node], cleaned: CleanGraph) -> None:
    (results,) = trace.gm.graph.output_node().args
    copied = []
    for result in results:  # type: ignore[union-attr]  # the traced function returns a list
        if not isinstance(result, fx.Node):
            raise CaptureError(f"the model returns {result!r}, which the tracer took for a tensor")
        copied.append(env[result])
    first_update = len(copied) - len(trace.updated_buffers)
    cleaned.outputs = copied[:first_update]
    cleaned.updates = dict(zip(trace.updated_buffers, copied[first_update:], strict=True))
    graph.output(tuple(copied))


def divide_numbers(_trace: Trace, cleaned: CleanGraph) -> None:
    """Factors that are one over the number of rows become divisors."""
    divide_by_rows(cleaned.gm.graph)


def part_rows(trace: Trace, cleaned: CleanGraph) -> None:
    """Rows that stand with others in a dimension for a linear layer stand in their own."""
    keep_rows_apart(cleaned.gm.graph, trace.reader.read)


def pin_strides(trace: Trace, cleaned: CleanGraph) -> None:
    """What is read by strides gets the layout that it was traced with."""
    pin_layouts(cleaned.gm.graph, trace.reader.read)


def drop_masks(trace: Trace, cleaned: CleanGraph) -> None:
    """Attention masks that hide nothing or the future only, and what made them."""
    drop_plain_masks(cleaned.gm.graph, trace.reader.read)
    cleaned.gm.graph.eliminate_dead_code(is_impure_node=has_effect)


def sort_into_roles(trace: Trace, cleaned: CleanGraph) -> None:
    """Constants that are still used, integers made of the batch size, and Ops."""
    graph = cleaned.gm.graph
    used = {node for node in graph.nodes if node.op == "get_attr"}
    cleaned.constants = [constant for constant in cleaned.constants if constant in used]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        if isinstance(value, (*SYMBOLIC, int, float)) and not isinstance(value, bool):
            cleaned.dims[node] = _batch_integer(trace, node, value)
        elif not is_tuple_access(node):
            cleaned.ops.append(node)


def _batch_integer(trace: Trace, node: fx.Node, value: Any) -> Dim:
    dim = trace.reader.read(value)
    if dim is None:
        expr = expression(value) if isinstance(value, SYMBOLIC) else value
        if _reads_data(trace, value):
            raise CaptureError(
                f"{place_of(node)} reads a number from a tensor (.item() or the like) and uses it as an argument; "
                "keep it a tensor, or name the sub-module in leaf_modules"
            )
        raise CaptureError(
            f"{place_of(node)} computes a number from the batch size that is not of the form a*rows + b ({expr}): "
            "divide a tensor by x.shape[0] where it is used, take the mean over the rows (x.mean(0), x.mean()), or "
            "compute the number with tensors (torch.ones_like(x[:, 0]).sum())"
        )
    return dim


def _reads_data(trace: Trace, value: Any) -> bool:
    return isinstance(value, SYMBOLIC) and bool(expression(value).free_symbols - {trace.reader.symbol})


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


PASSES: tuple[Callable[[Trace, CleanGraph], None], ...] = (
    drop_unused_in_trace,
    copy_what_runs,
    take_wholes,
    make_functional,
    convert_once,
    divide_numbers,
    part_rows,
    drop_unused,
    divide_means,
    pin_strides,
    drop_masks,
    keep_data_dependent,
    keep_lookups,
    sort_into_roles,
)
"""From the raw trace to the graph that is lowered."""
