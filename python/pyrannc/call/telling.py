"""What a captured call means for the user, in words."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from pyrannc._native import Plan
from pyrannc.call.single_row import first_normalising
from pyrannc.call.variant import Variant
from pyrannc.capture import KeptWhole, Part
from pyrannc.core.graph import GraphFacts
from pyrannc.core.plan import PlanFacts
from pyrannc.core.tail import TailPart
from pyrannc.job import process
from pyrannc.log import get_logger

_log = get_logger("RaNNCModule")
_BY_NUMBERS = {
    "it takes rows of the batch by other rows",
    "it takes rows out of the batch",
    "it writes to rows of the batch by other rows",
}
_LARGE_TAIL = 0.2
"""Share of the Ops from which on a part that every rank computes deserves a word."""


def tell_of_mixing(variant: Variant) -> None:
    """Warns of the first Op that mixes rows, if there is one."""
    tail = variant.tail
    if tail is None or not tail.mixing:
        return
    share = len(tail.ops) / len(variant.whole.facts.ops)
    large = (
        f" They are {share:.0%} of the model, computed by every rank on all rows of the batch, in one piece. "
        'RaNNCModule(..., row_mixing="microbatch") lets each microbatch mix its own rows instead; where rows are put '
        'back in their places, as experts do with tokens, row_wise_modules=["layers.*.experts"] says so; a custom '
        "function may also be written so that it treats each row by itself"
    )
    given = None if process.get_world_size() == 1 else _given_numbers(variant.whole.facts, tail)
    numbers = (
        f" Tensor {given} of the arguments has numbers of rows: they count over the rows of all ranks, those of rank 0 "
        "first. To numbers of a rank's own rows add how many rows the ranks before it have."
    )
    _log.warning(
        "%s: rows of the batch meet there. It and what follows runs once a step, on the whole batch.%s%s",
        variant.first_mixing(),
        "" if given is None else numbers,
        large if share > _LARGE_TAIL else "",
    )


def _given_numbers(facts: GraphFacts, tail: TailPart) -> int | None:
    """The place of the first argument with numbers by which rows of the batch are taken, or written to."""
    makers = {result: op for op in facts.ops for result in op.results}
    waiting = [value for op, how in tail.mixing if how in _BY_NUMBERS for value in facts.ops[op].operands]
    seen = set[int]()
    while waiting:
        value = waiting.pop(0)
        dtype = facts.values[value].dtype
        if value in seen or dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
            continue
        seen.add(value)
        if value in facts.inputs:
            return facts.inputs.index(value)
        waiting += makers[value].operands if value in makers else ()
    return None


def tell_of_unseen(variant: Variant) -> None:
    """Warns of Python objects that are too many to look after."""
    unseen = variant.captured.python_state.unseen
    if unseen is not None:
        _log.warning(
            "the model's code can reach so many Python objects that not all are looked after, such as what is in the "
            "%s. What is only read there is right. What the forward changes there, or the script between calls, is not "
            "seen: pass that as an argument, keep it in a buffer, or return it from the forward",
            unseen,
        )


def tell_of_normalising(variant: Variant, plan: Plan) -> None:
    """Warns of batch normalisation that sees a part of the rows."""
    place, facts = first_normalising(variant.captured), PlanFacts.of(plan)
    if place is not None and (facts.microbatches > 1 or any(len(stage.ranks) > 1 for stage in facts.stages)):
        _log.warning(
            "%s normalises over the rows in hand: each Replica its own rows of each microbatch, not the global batch. "
            "Layers such as nn.GroupNorm and nn.LayerNorm treat each row by itself",
            place,
        )


def no_plan_for_both(missing: Sequence[str], left_out: Sequence[str]) -> str:
    """What to do about a call whose parameters are not those of the first.

    Args:
        missing: that the call uses and the first did not.
        left_out: the other way round.
    """
    if not missing:
        return "Call undeploy() before this kind of call, or make it the first one"
    return (
        f"This call uses {', '.join(missing)} and not {', '.join(left_out)}, the call that the plan was made for the "
        "other way round: make the first call one that uses all of them, as a model does that computes both and "
        "chooses with torch.where, or call undeploy() in between"
    )


def no_gradients_of(names: Sequence[str]) -> str:
    """Why a call does without gradients of parameters that all ranks compute with in the call of the Plan."""
    return (
        f"this call has no gradients for {', '.join(names)}: in the call that the plan was made for, all ranks compute "
        "with them on the rows of the global batch. Evaluate under torch.no_grad(); to train by this kind of call, "
        "call undeploy() before it"
    )


def tell_of_whole_parts(variant: Variant) -> None:
    """Warns of each kind of part of the model that is kept whole because the capture fails in it."""
    whole, tail = variant.whole.captured, set(() if variant.tail is None else variant.tail.ops)
    for kept in whole.kept_whole:
        ops = ops_of(variant, kept)
        others = f" and {len(kept.paths) - 1} like it" if len(kept.paths) > 1 else ""
        runs = (
            "it runs once a step, on all rows, on every rank"
            if tail.intersection(ops)
            else "each row by itself, as trials with random rows say (tested, not proven)"
        )
        name = str(Part.of(kept.paths[0]))
        _log.warning(
            "%s cannot be captured piece by piece: %s. %s%s, with %.0f%% of the parameters, stays in one piece: %s",
            kept.place,
            kept.cause.splitlines()[0],
            "The whole model" if name == "the model" else name,
            others,
            100 * share_of(variant, ops),
            runs,
        )


def tell_of_groups(variant: Variant, batch_rows: int) -> None:
    """Warns of each kind of sub-module in which rows meet, and which trials let stay in the body."""
    shown = variant.whole.captured.shown_rows
    fewer = (
        f", of {shown} of the batch's {batch_rows} rows, for which there was memory and time"
        if shown < batch_rows
        else ""
    )
    for kept in variant.whole.captured.tested_together:
        others = f" and {len(kept.paths) - 1} like it" if len(kept.paths) > 1 else ""
        _log.warning(
            "%s: rows of the batch meet in %s%s, and yet each row of its results depends on that row alone, as trials "
            "with random rows say (tested, not proven%s)",
            kept.place,
            Part.of(kept.paths[0]),
            others,
            fewer,
        )


def ops_of(variant: Variant, kept: KeptWhole) -> list[int]:
    """The Ops that a part kept whole has become."""
    titles = {f"pyrannc.opaque.{Part.of(path).title}" for path in kept.paths}
    nodes = enumerate(variant.whole.captured.op_nodes)
    return [op for op, node in nodes if str(getattr(node.target, "title", "")).partition(",")[0] in titles]


def share_of(variant: Variant, ops: Sequence[int]) -> float:
    """Of all parameters that are used, by elements, those that some Ops take."""
    facts = variant.whole.facts
    sizes = {param.value: prod(facts.values[param.value].shape_at(0)) for param in facts.params}
    taken = {value for op in ops for value in facts.ops[op].operands if value in sizes}
    used = {value for op in facts.ops for value in op.operands if value in sizes}
    return sum(sizes[value] for value in taken) / max(1, sum(sizes[value] for value in used))
