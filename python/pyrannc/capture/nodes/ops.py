"""What torch's operator schemas, and a few facts missing from them, say about a node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from pyrannc.capture.torch_internals.levels import VMAP_BEGIN, VMAP_END
from pyrannc.capture.torch_internals.operators import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    HigherOrderOperator,
    OpOverload,
    schema,
)

from .draws import call_draws
from .leaf import GradientHook, OpaqueCall
from .operands import arguments, mutated_arguments, nodes_in

# Checks that hold by the way of tracing.
_ASSERTIONS = (
    "aten::_assert_scalar",
    "aten::_assert_tensor_metadata",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
)
# The begin and the end of what profilers show under a name (torch.profiler.record_function).
_MARKS = ("profiler::_record_function_enter", "profiler::_record_function_enter_new", "profiler::_record_function_exit")
# Composite ops that return their operand, or a view of it, when they can.
_MAY_RETURN_VIEW = {
    "aten::reshape", "aten::reshape_as", "aten::flatten", "aten::contiguous", "aten::to", "aten::type_as",
    "aten::_reshape_copy", "aten::ravel", "aten::unflatten", "aten::narrow", "aten::expand_as", "aten::float",
    "aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::movedim", "aten::swapaxes",
    "aten::einsum", "aten::broadcast_to", "aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d",
}  # fmt: skip
# Draws of a tensor's form: their operator, unlike the function that the model calls, refuses to be differentiated.
_OF_FORM = ("aten::randint_like",)


def target_name(target: Any) -> str:
    """Qualified name of a node's target, stable over processes."""
    if isinstance(target, OpaqueCall):
        return target.title
    if isinstance(target, OpOverload):
        return str(target)
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module}.{getattr(target, '__qualname__', getattr(target, '__name__', type(target).__qualname__))}"


def is_assertion(node: fx.Node) -> bool:
    """True for a check that the tracer added and no run needs."""
    return _is_one_of(_ASSERTIONS, node)


def takes_form_alone(node: fx.Node) -> bool:
    """True for what takes nothing but the form of its operand, so that no gradient passes to it."""
    return _is_one_of(_OF_FORM, node)


def _is_one_of(names: Sequence[str], node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and schema(node.target).name in names


def root_of(node: fx.Node) -> fx.Node:
    """What a view, or the result of a change in place, is memory of."""
    while node.op == "call_function" and (operands := aliased_arguments(node)):
        node = operands[0]
    return node


def has_effect(node: fx.Node) -> bool:
    """True when the node must stay even if nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if is_assertion(node) or _is_one_of(_MARKS, node):
        return False
    target = node.target
    if isinstance(target, OpOverload):
        # A dead random op stays, so that those after it draw the same numbers as in the plain model.
        has_side_effect = schema(target).is_mutable or bool(mutated_arguments(node)) or not schema(target).returns
        return has_side_effect or draws_random_numbers(node)
    if isinstance(target, OpaqueCall) and target.changes:
        return True
    return isinstance(target, GradientHook) or opens_region(node) or closes_region(node)


def opens_region(node: fx.Node) -> bool:
    """True for the start of an autocast region round one Op, or of a vmap level."""
    return node.target is ENTER_AUTOCAST or getattr(node.target, "__name__", "") == VMAP_BEGIN


def closes_region(node: fx.Node) -> bool:
    """True for the end of an autocast region round one Op, or of a vmap level."""
    return node.target is EXIT_AUTOCAST or getattr(node.target, "__name__", "") == VMAP_END


def is_tuple_access(node: fx.Node) -> bool:
    """True for ``results[i]`` of an op with several results."""
    return node.op == "call_function" and node.target is operator.getitem


def is_higher_order(node: fx.Node) -> bool:
    """True for ``cond``, ``while_loop`` and the like, which hold graphs of their own."""
    return isinstance(node.target, HigherOrderOperator)


def aliased_arguments(node: fx.Node) -> list[fx.Node]:
    """The operands whose storage a result has, by schema."""
    if not isinstance(node.target, OpOverload):
        return []
    named = arguments(node)
    if "dropout" in schema(node.target).name and "input" in named and not draws_random_numbers(node):
        return nodes_in(named["input"])  # it returns its operand, though its schema does not say so
    returned: set[str] = set()
    for result in schema(node.target).returns:
        if result.alias_info is not None:
            returned |= result.alias_info.before_set
    aliased = []
    for argument in schema(node.target).arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & returned:
            aliased.extend(nodes_in(named[argument.name]))
    return aliased


def may_return_view(node: fx.Node) -> bool:
    """True when the result is a view of the first operand for some shapes and strides."""
    if not isinstance(node.target, OpOverload) or schema(node.target).name not in _MAY_RETURN_VIEW:
        return False
    made, operand = node.meta.get("val"), next((item.meta.get("val") for item in node.all_input_nodes), None)
    # A cast has memory of its own.
    return not (isinstance(made, Tensor) and isinstance(operand, Tensor) and made.dtype != operand.dtype)


def draws_random_numbers(node: fx.Node) -> bool:
    """True when the node's result depends on the state of a random generator."""
    if isinstance(node.target, OpaqueCall):
        return not isinstance(node.target, GradientHook) and node.target.draws
    return isinstance(node.target, OpOverload) and call_draws(node.target, node.args, node.kwargs)
