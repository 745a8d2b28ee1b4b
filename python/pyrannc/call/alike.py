"""Captures that are equal on all ranks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from pyrannc._native import Graph
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import (
    FROM_ARGUMENTS,
    Answering,
    Captured,
    CaptureOptions,
    KeptWhole,
    PartOfBatchError,
    Sample,
    Tracing,
    capture_sample,
    trace,
)
from pyrannc.capture.nodes.row_conditions import RowCondition
from pyrannc.capture.user.row_lists import has_row_lists
from pyrannc.errors import CaptureError, MismatchError
from pyrannc.job import agree


def capture_alike(
    sample: Sample,
    options: CaptureOptions,
    batch: BatchRows,
    *,
    apart: bool = False,
    tried_together: Sequence[str] = (),
    kept_whole: Sequence[KeptWhole] = (),
    tracing: Tracing = trace,
) -> tuple[Captured, Graph]:
    """The captured call with its Graph. All ranks call it.

    What the model asks its data, the global batch answers.

    Args:
        kept_whole: as an earlier capture of the call has found.
        tracing: gives the trace of the call.

    Raises:
        CaptureError: the call cannot be captured.
        MismatchError: another rank captured something else.
    """

    def attempt(sample: Sample, answers: Answering) -> tuple[Captured, Graph] | None:
        """None where it takes the whole batch: for its answers, or as this rank has no rows to try parts with."""
        try:
            captured = capture_sample(
                sample,
                all_rows=batch.total,
                options=options,
                answers=answers,
                apart=apart,
                tried_together=tried_together,
                kept_whole=kept_whole,
                tracing=tracing,
            )
        except PartOfBatchError:
            return None
        except CaptureError:
            # Made-up rows may be none that the model can be tried with, such as sequences without a length.
            if sample.rows:
                raise
            return None
        return captured, Graph.from_json(captured.graph_json)

    answers = Answering(part_of_batch=batch.in_parts)
    # Items without elements are none that a model can be tried with.
    none_here = 0 in batch.per_rank and has_row_lists((sample.args, sample.kwargs))
    found = None if none_here else agree.together(lambda: attempt(sample, answers))
    if any(asks for (asks,) in agree.gather_numbers((found is None,))):
        tensors, structure = sample.flat()
        batch.refuse_other_shapes(tensors, sample.per_row)
        args, kwargs = structure.rebuild(batch.joined(tensors, sample.per_row, range(len(tensors))))
        whole = replace(sample, args=args, kwargs=kwargs, rows=batch.total)
        found = agree.together(lambda: attempt(whole, FROM_ARGUMENTS))
    assert found is not None, "the whole batch answers"
    captured, graph = _as_all_have_tried(*found)
    captured = _as_all_have_asked(captured)
    hashes: list[str] = agree.gather_objects(graph.hash())
    if len(set(hashes)) > 1:
        raise MismatchError(_first_difference(captured, graph, hashes))
    if len(set(agree.gather_objects(captured.limits))) > 1:
        raise MismatchError("the ranks' models limit their parameters in different ways")
    return captured, graph


def _as_all_have_tried(captured: Captured, graph: Graph) -> tuple[Captured, Graph]:
    """A call treats each row by itself if it does on all ranks, whose parameters may still differ."""
    tried: list[tuple[bool, ...]] = agree.gather_objects(captured.row_wise)
    if len(set(map(len, tried))) > 1 or len(set(tried)) == 1:
        return captured, graph
    captured = captured.with_row_wise([all(found) for found in zip(*tried, strict=True)])
    return captured, Graph.from_json(captured.graph_json)


def _as_all_have_asked(captured: Captured) -> Captured:
    """It stands for batches that answer alike on all ranks, which may have asked different things."""
    own = captured.row_conditions, captured.alone
    everyone: list[tuple[tuple[RowCondition, ...], bool]] = agree.gather_objects(own)
    conditions = {condition.asked: condition for asked, _ in everyone for condition in asked}
    return replace(captured, row_conditions=tuple(conditions.values()), alone=any(alone for _, alone in everyone))


def _first_difference(captured: Captured, graph: Graph, hashes: Sequence[str]) -> str:
    """Names the ranks whose Graph differs from rank 0's, and the first Op or constant that does."""
    texts: list[list[str]] = agree.gather_objects(graph.op_texts())
    other = next(rank for rank, found in enumerate(hashes) if found != hashes[0])
    here, there = first_difference(texts[0], texts[other])
    if here != there:
        return f"the ranks have different models: rank 0 has\n  {here}\nwhere rank {other} has\n  {there}"
    everyone: list[list[tuple[int, str]]] = agree.gather_objects(_constants(captured))
    for (value, data), (_, others) in zip(everyone[0], everyone[other], strict=False):
        if data != others:
            reader = next((text for text in texts[0] if re.search(rf"\bv{value}\b", text)), "what the model returns")
            return (
                "the ranks have different models: a tensor or an array that is no parameter and no buffer has other "
                f"values on rank {other} than on rank 0. It is used by\n  {reader}\nMake it from the same seed on all "
                "ranks (torch.manual_seed(0) before the model is made), or register it (self.register_buffer(...)): "
                "of buffers, rank 0's count"
            )
    return f"the ranks have different models: rank {other}'s parameters, buffers or inputs are not those of rank 0"


def _constants(captured: Captured) -> list[tuple[int, str]]:
    """The Value of each constant, with what tells its data from others."""
    listed = json.loads(captured.graph_json)["constants"]
    return [(item["value"], hashlib.sha256(item["data"].encode()).hexdigest()) for item in listed]


def first_difference(mine: Sequence[str], theirs: Sequence[str], without: str = "nothing") -> tuple[str, str]:
    """The first Op that is not the same in two Graphs, on both sides; twice ``without`` when none is."""
    pairs = zip_longest(mine, theirs, fillvalue="nothing")
    return next(((here, there) for here, there in pairs if here != there), (without, without))
