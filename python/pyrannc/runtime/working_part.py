"""Which parameters a Stage reads only to convert them, and what is left of its Ops."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from pyrannc.blocks.conversion import is_conversion
from pyrannc.capture import Captured
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import SpanPart, StagePart
from pyrannc.store.working_copies import Key


@dataclass(frozen=True)
class WorkingPart:
    """A Stage that takes working copies of parameters.

    Attributes:
        part: its Ops and Spans without the conversions, whose results come in.
        copies: by Value, what comes in.
    """

    part: StagePart
    copies: dict[int, Key]


def working_part(captured: Captured, facts: GraphFacts, part: StagePart) -> WorkingPart:
    """Leaves the conversions of parameters to the Store where nothing else is done with them."""
    users: dict[int, list[int]] = {}
    for op in part.ops:
        for value in set(facts.ops[op].operands):
            users.setdefault(value, []).append(op)
    wanted = {*part.sends, *part.outputs, *(buffer.update for buffer in facts.buffers)}
    copies: dict[int, Key] = {}
    dropped: set[int] = set()
    for param in (facts.params[number] for number in part.params):
        readers = users.get(param.value, [])
        if len(readers) != 1 or not is_conversion(captured, facts, readers[0], param.value):
            continue
        (result,) = facts.ops[readers[0]].results
        if not wanted & {result, param.value} and result not in facts.mutated_roots:
            copies[result] = param.names[0], facts.values[result].dtype
            dropped.add(readers[0])
    left = replace(
        part,
        ops=tuple(op for op in part.ops if op not in dropped),
        prologue=None if part.prologue is None else _without(facts, part.prologue, dropped),
        spans=tuple(_without(facts, span, dropped) for span in part.spans),
    )
    return WorkingPart(left, copies)


def _without(facts: GraphFacts, span: SpanPart, dropped: Set[int]) -> SpanPart:
    """A Span that takes what some of its Ops would have made."""
    places = [place for place, op in enumerate(span.ops) if op in dropped]
    if not places:
        return span
    ops = [op for op in span.ops if op not in dropped]
    made = {facts.ops[span.ops[place]].results[0] for place in places}
    converted = {facts.ops[span.ops[place]].operands[0] for place in places}
    used = dict.fromkeys(value for op in ops for value in facts.ops[op].operands)
    return SpanPart(
        ops=tuple(ops),
        takes=(*(value for value in span.takes if value not in converted), *(value for value in used if value in made)),
        gives=tuple(value for value in span.gives if value not in made),
        hash=span.hash_without(places),
    )
