"""Plans made to order: any division over any ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pyrannc._native import Buckets, Cluster, Graph, Plan, Program
from pyrannc.capture import capture
from pyrannc.core.program import RankProgram
from pyrannc.errors import PlanError


def graph_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> Graph:
    """What parts of the batch go through in one call."""
    captured = capture(model, args, kwargs, device=torch.device("cpu"), rows=rows)
    return Graph.from_json(captured.graph_json).divide_tail("batch").body


def searched_plan(graph: Graph, replicas: Sequence[int], microbatches: int, batch_rows: int) -> Plan:
    """The best Plan with these Replicas for each Stage."""
    settings = {
        "world_size": sum(replicas),
        "batch_rows": max(batch_rows, microbatches, sum(replicas)),
        "replicas": list(replicas),
        "microbatches": microbatches,
    }
    return Plan.search(graph, Cluster.preset("cpu", 1, sum(replicas)), [], json.dumps(settings))


def scheduled(plan: Plan, schedule: str | list[str]) -> Plan:
    """The same Plan under another Schedule: a name, or each Stage's computations."""
    return sealed({**json.loads(plan.to_json()), "schedule": schedule})


def divided(plan: Plan, sharding: str | Sequence[str]) -> Plan:
    """The same Plan, with what the Replicas of each Stage divide; one Replica divides nothing."""
    form = json.loads(plan.to_json())
    levels = [sharding] * len(form["stages"]) if isinstance(sharding, str) else sharding
    stages = [
        {**stage, "sharding": level if len(stage["ranks"]) > 1 else "none"}
        for stage, level in zip(form["stages"], levels, strict=True)
    ]
    return sealed({**form, "stages": stages})


def rank_programs(model: nn.Module, rows: int, width: int, replicas: Sequence[int], call: str) -> list[RankProgram]:
    """What each rank does in a call of the best Plan with 4 microbatches, all of the batch on rank 0."""
    graph = graph_of(model, (torch.ones(rows, width),), {}, rows)
    plan = searched_plan(graph, replicas, 4, rows)
    partition = plan.partition(graph)
    buckets = Buckets.divide(
        plan,
        partition,
        graph,
        trained=range(len(json.loads(graph.to_json())["params"])),
        everywhere=[],
        reduce_dtype="float32",
        undivided=[],
        whole_gradients=[],
        by_element=True,
    )
    ranks = sum(replicas)
    program = Program.build(plan, partition, buckets, [rows, *[0] * (ranks - 1)], True, call)
    return [RankProgram.from_json(program.rank_view(rank)) for rank in range(ranks)]


def main_op_count(graph: Graph) -> int:
    """Number of Ops that a Plan divides."""
    whole = json.loads(searched_plan(graph, [1], 1, 1).to_json())
    count: int = whole["stages"][0]["ops"]["end"]
    return count


def cut_plan(
    graph: Graph, cuts: Sequence[int], ranks: Sequence[Sequence[int]], microbatches: int, rows: int = 1
) -> Plan:
    """A Plan with cuts before these main Ops, and these ranks for each Stage, for so many rows or one a microbatch.

    Raises:
        PlanError: a cut is not possible there.
    """
    form = json.loads(searched_plan(graph, [1], 1, 1).to_json())
    (whole,) = form["stages"]
    whole["predicted"] = _zeroed(whole["predicted"])
    del whole["feeds"]
    ends = [0, *cuts, whole["ops"]["end"]]
    form["stages"] = [
        {**whole, **_run(first, end), "ranks": list(members), "blocks": _blocks(whole["blocks"], first, end)}
        for (first, end), members in zip(pairwise(ends), ranks, strict=True)
    ]
    form["predicted"] = _zeroed(form["predicted"])
    form["world_size"] = sum(len(members) for members in ranks)
    form["microbatches"] = microbatches
    form["batch_rows"] = max(rows, microbatches)
    plan = sealed(form)
    plan.partition(graph)
    return plan


def _run(first: int, end: int) -> dict[str, Any]:
    return {"ops": {"first": first, "end": end}}


def _blocks(blocks: Sequence[dict[str, Any]], first: int, end: int) -> list[dict[str, Any]]:
    """The Blocks between two Ops, cut there."""
    runs = [(max(first, block["ops"]["first"]), min(end, block["ops"]["end"]), block) for block in blocks]
    return [{**block, **_run(begin, stop)} for begin, stop, block in runs if begin < stop]


def possible_cuts(graph: Graph) -> list[int]:
    """Main Ops before which a Stage may begin."""
    return [cut for cut in range(1, main_op_count(graph)) if _is_possible(graph, cut)]


def sealed(form: dict[str, Any]) -> Plan:
    """The Plan of a plan file's content, with the right checksum."""
    return Plan.seal(json.dumps(form))


def _is_possible(graph: Graph, cut: int) -> bool:
    try:
        cut_plan(graph, [cut], [[0], [1]], 1)
    except PlanError:
        return False
    return True


def _zeroed(item: Any) -> Any:
    """The same form with zeros."""
    if isinstance(item, dict):
        return {key: _zeroed(value) for key, value in item.items()}
    return type(item)(0)
