"""Hooks of gradients in a forward that cannot get what they get in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pyrannc.capture import Captured
from pyrannc.capture.nodes.leaf import GradientHook
from pyrannc.capture.nodes.ops import is_tuple_access
from pyrannc.capture.passes.clean import place_of
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts, StagePart
from pyrannc.core.program import RankProgram
from pyrannc.core.tail import TailPart
from pyrannc.errors import CaptureError


def refuse_gradients_in_parts(captured: Captured, part: StagePart, program: RankProgram) -> None:
    """Finds out that hooks of this rank's Stage make the same of a part of the batch as of all of it.

    Raises:
        CaptureError: one of them does not, and this rank has a part of the batch at a time.
    """
    if program.call == "forward" or all(hi - lo == program.total_rows for lo, hi in program.rows):
        return
    for op in part.ops:
        call = captured.op_nodes[op].target
        if isinstance(call, GradientHook) and not call.takes_parts:
            raise CaptureError(
                f"a hook of gradients at {captured.place(op)} makes something else of the gradients of some rows than "
                "of those of the whole batch, as with a norm or a mean of them, and the batch comes in parts: let it "
                "treat each row by itself, change gradients of parameters after backward() instead, or let each part "
                'stand for itself: RaNNCModule(..., row_mixing="microbatch")'
            )


def refuse_hooks_of_results(captured: Captured, facts: GraphFacts, tail: TailPart) -> None:
    """Finds out that no hook is on what parts of the batch make together and the model returns.

    Such a result has its gradient from the script, and none passes through the tail.

    Args:
        captured: body and tail.
        facts: of both.

    Raises:
        CaptureError: there is one.
    """
    results = {item.value for item in tail.joined} & set(facts.outputs)
    for op in tail.ops:
        if _is_hook(captured.op_nodes[op]) and not results.isdisjoint(facts.ops[op].operands):
            raise CaptureError(
                f"{captured.place(op)} gives a hook to what the model returns for all rows, such as a loss; give it to "
                "the result of the call: loss = model(...); loss.register_hook(...)"
            )


def refuse_hooks_of_copies(captured: Captured, parts: Parts, tail: Sequence[fx.Node]) -> None:
    """Finds out that what has a hook is computed in one place: what depends on no rows is, wherever it is used.

    Args:
        captured: the body.
        parts: its Stages.
        tail: the Ops that follow it.

    Raises:
        CaptureError: something is computed in a second place, where it has no hook.
    """
    hooks = list(filter(_is_hook, (*captured.op_nodes, *tail)))
    places = [{captured.op_nodes[op] for op in part.ops} for part in parts.stages] if hooks else []
    places.append(set(tail))
    for node in hooks:
        maker = _maker(node)
        if any(maker in ops and node not in ops for ops in places):
            raise CaptureError(
                f"{place_of(node)} gives a hook to what is made of parameters alone and used by several Stages, or "
                "beside what all rows have made together, such as a loss: each has its own, and gradients of its own; "
                "give the parameters hooks before the first call, outside of the forward"
            )


def _is_hook(node: fx.Node) -> bool:
    return isinstance(node.target, GradientHook)


def _maker(hook: fx.Node) -> fx.Node:
    (made,) = hook.all_input_nodes
    return made.all_input_nodes[0] if is_tuple_access(made) else made
