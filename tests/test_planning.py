"""From the configuration to a Plan: dry runs and cluster files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch import nn

import pyrannc
from pyrannc._native import Cluster, Graph, Plan, Profile
from pyrannc.call.variant import Variant
from pyrannc.call.whole_batch import BatchRows
from pyrannc.capture import Sample
from pyrannc.config import Config
from pyrannc.core.plan import content
from pyrannc.errors import ClusterError, MemoryShortageError, PlanError, PlanFileError
from pyrannc.job import phases
from pyrannc.planning import attempts, decision
from pyrannc.planning.machine import RankDevice, find_cluster
from pyrannc.planning.search import Request, search
from pyrannc.profile.cache import ProfileCache
from pyrannc.profile.meter import Meter
from pyrannc.profile.profiler import profile
from tests.profile.models import CPU, WIDTH, Layers, Skips, subject
from tests.ranks import RankPool

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Ranks = Callable[[int], RankPool]
GIB = 1 << 30


def call_once() -> str:
    """How the first call ends."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    module = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), lr=0.1))
    try:
        module(torch.randn(8, 64))
    except SystemExit as end:
        return f"exit {end.code}"
    except pyrannc.RaNNCError as error:
        return str(error)
    module.undeploy()
    return "trained"


def test_a_dry_run_plans_for_the_cluster_of_a_file(ranks: Ranks, tmp_path: Path) -> None:
    cluster, plan = tmp_path / "cluster.toml", tmp_path / "plan.json"
    cluster.write_text(Cluster.preset("H100", 2, 8).to_toml())
    env = {
        "RANNC_CLUSTER_FILE": str(cluster),
        "RANNC_PARTITIONING_DRY_RUN_NP": "16",
        "RANNC_SAVE_DEPLOYMENT": "1",
        "RANNC_DEPLOYMENT_FILE": str(plan),
        "RANNC_ENABLE_ZERO": "2",
    }
    assert ranks(2).run(call_once, env=env) == ["exit 0", "exit 0"]
    found = json.loads(plan.read_text())
    assert (found["world_size"], found["batch_rows"]) == (16, 128)
    assert all((stage["sharding"] == "gradients") == (len(stage["ranks"]) > 1) for stage in found["stages"])
    # An H100 takes microseconds, and its framework memory.
    assert found["predicted"]["step_us"] < 2000
    assert found["stages"][0]["predicted"]["memory"]["framework_bytes"] > GIB


def test_a_job_may_be_planned_with_the_figures_of_a_file(ranks: Ranks, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(Cluster.preset("cpu", 1, 2).to_toml())
    assert ranks(2).run(call_once, env={"RANNC_CLUSTER_FILE": str(cluster)}) == ["trained", "trained"]
    cluster.write_text(Cluster.preset("cpu", 1, 1).to_toml())
    first, second = ranks(2).run(call_once, env={"RANNC_CLUSTER_FILE": str(cluster)})
    assert "world_size must be from 1 to the cluster's 1 device" in first
    assert "rank 0 cannot go on" in second


def test_bad_cluster_files_are_told_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    for text in ("", "[device", Cluster.preset("cpu", 1, 2).to_toml().replace("gb_per_s = ", "gb_per_s = -", 1)):
        cluster.write_text(text)
        messages = ranks(2).run(call_once, env={"RANNC_CLUSTER_FILE": str(cluster)})
        assert all("cluster" in message for message in messages), messages


def test_the_cluster_is_that_of_the_ranks() -> None:
    def rank(host: str) -> RankDevice:
        return RankDevice("NVIDIA H200", 140 * GIB, True, host)

    text = find_cluster(Config(), [rank("a"), rank("a"), rank("b"), rank("b")]).to_toml()
    assert text.count("[[node]]") == 1
    for part in ("devices = 2", "count = 2", "tf32 = true", "memory_gib = 140"):
        assert part in text


def test_ranks_of_one_host_share_its_memory() -> None:
    ranks = [RankDevice("cpu", 8 * GIB, False, host) for host in ("a", "a", "b")]
    cluster = find_cluster(Config(), ranks)
    assert cluster.devices == 3
    assert cluster.to_toml().count("memory_gib = 4") == 1
    assert cluster.to_toml().count("memory_gib = 8") == 1


def test_the_search_uses_what_was_measured() -> None:
    whole = subject(Layers(), [torch.randn(8, WIDTH)], (1, 8))
    (measured,) = profile(whole, CPU, ProfileCache(None))
    slower = json.loads(measured.to_json())
    for points in slower["blocks"].values():
        for point in points:
            point["forward_us"] *= 1000
            point["backward_us"] *= 1000
    cluster = Cluster.preset("cpu", 1, 1)
    settings = json.dumps({"batch_rows": 8, "microbatches": 1})
    graph = Graph.from_json(whole.blocks.source.captured.graph_json)
    plans = [
        json.loads(Plan.search(graph, cluster, [known], settings).to_json())["stages"][0]["predicted"]
        for known in (measured, Profile.seal(json.dumps(slower)))
    ]
    action_us = tomllib.loads(cluster.to_toml())["device"]["kind0"]["action_us"]
    for way in ("forward_us", "backward_us"):
        once, thousandfold = (plan[way] - action_us for plan in plans)
        assert thousandfold == pytest.approx(1000 * once)
        # Where the Spans add up, no Block is missing and none counts twice.
        by_hash = json.loads(measured.to_json())["blocks"]
        assert once == pytest.approx(sum(by_hash[span][-1][way] for span in whole.spans.hashes))


def test_working_copies_are_made_and_held_once() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        whole = subject(Layers(), [torch.randn(64, WIDTH)], (1, 64))
    graph = Graph.from_json(whole.blocks.source.captured.graph_json)
    numel = sum(param.numel() for param in Layers().parameters())
    plan = Plan.search(graph, Cluster.preset("cpu", 1, 1), [], json.dumps({"batch_rows": 64, "microbatches": 1}))
    memory = json.loads(plan.to_json())["stages"][0]["predicted"]["memory"]
    assert memory["params_bytes"] == (4 + 2) * numel
    # A microbatch keeps what its layers take in, in half the digits, and no copy of a weight.
    assert memory["activations_bytes"] <= 64 * 2 * 9 * WIDTH


@pytest.mark.parametrize("module", [Layers(), Skips()], ids=["layers", "skips"])
def test_the_blocks_together_keep_what_the_whole_model_keeps(module: nn.Module) -> None:
    batch = torch.randn(64, WIDTH)
    whole = subject(module, [batch], (1, 64))
    (measured,) = profile(whole, CPU, ProfileCache(None))
    settings = json.dumps({"batch_rows": 64, "microbatches": 1})
    plan = Plan.search(
        Graph.from_json(whole.blocks.source.captured.graph_json), Cluster.preset("cpu", 1, 1), [measured], settings
    )
    predicted = json.loads(plan.to_json())["stages"][0]["predicted"]["memory"]
    with Meter(CPU).watch_memory() as memory:
        output = module(batch)
        # The model saves its input, and gives out what waits for the end of the step in another place.
        kept_bytes = memory.held_bytes() + batch.nbytes - output.nbytes
    assert predicted["activations_bytes"] == pytest.approx(kept_bytes, rel=0.01)


def test_a_plan_written_by_hand_is_checked_and_predicted() -> None:
    whole = subject(Layers(), [torch.randn(8, WIDTH)], (1, 8))
    graph = Graph.from_json(whole.blocks.source.captured.graph_json)
    cluster, settings = Cluster.preset("cpu", 1, 2), json.dumps({"world_size": 2, "batch_rows": 16, "stages": 2})
    found = Plan.search(graph, cluster, [], settings)
    content = json.loads(found.to_json())
    best_us = content["predicted"]["step_us"]
    assert json.loads(found.predicted(graph, cluster, [], settings).to_json())["stages"] == content["stages"]
    first, last = content["stages"]
    *others, moved_block = [*first["blocks"], *last["blocks"]]
    first["blocks"], last["blocks"] = others, [moved_block]
    first["ops"]["end"] = last["ops"]["first"] = moved_block["ops"]["first"]
    moved = json.loads(Plan.seal(json.dumps(content)).predicted(graph, cluster, [], settings).to_json())
    assert moved["predicted"]["step_us"] > best_us
    first["ops"]["end"] += 1
    with pytest.raises(PlanFileError, match="the plan contradicts itself: stage 1 has main ops"):
        Plan.seal(json.dumps(content))


def test_the_measured_optimizer_replaces_that_of_the_device() -> None:
    whole = subject(Layers(), [torch.randn(8, WIDTH)], (1, 8))
    (measured,) = profile(whole, CPU, ProfileCache(None))
    content = json.loads(measured.to_json())
    assert content["update"]["update_us"] > 0
    params_bytes = 4 * sum(parameter.numel() for parameter in Layers().parameters())
    content["update"] = {"params_bytes": params_bytes, "update_us": 1234.5}
    graph = Graph.from_json(whole.blocks.source.captured.graph_json)
    settings = json.dumps({"batch_rows": 8, "microbatches": 1})
    plan = Plan.search(graph, Cluster.preset("cpu", 1, 1), [Profile.seal(json.dumps(content))], settings)
    assert json.loads(plan.to_json())["stages"][0]["predicted"]["update_us"] == pytest.approx(1234.5)


def test_a_search_without_time_gives_a_plan_and_says_so(ranks: Ranks) -> None:
    assert ranks(2).run(call_once, env={"RANNC_SEARCH_TIMEOUT_S": "0.001"}) == ["trained", "trained"]
    whole = subject(Layers(), [torch.randn(8, WIDTH)], (1, 8))
    graph = Graph.from_json(whole.blocks.source.captured.graph_json)

    def remark(timeout_s: float) -> str:
        config = Config(search_timeout_s=timeout_s)
        variant = SimpleNamespace(graph=graph, loss_inside=True, whole_part=None)
        request = Request(cast(Variant, variant), [], config, None, CPU, batch_rows=4096, gather_inputs=True)
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(phases, "note", told.append)
            search(request, Cluster.preset("cpu", 32, 8), [], 256)
        return "; ".join(told)

    assert "search_timeout_s" in remark(0.0001)
    assert "search_timeout_s" not in remark(0)


def test_a_missing_cluster_file() -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster file /nowhere/at\.toml"):
        find_cluster(Config(cluster_file="/nowhere/at.toml"), [])


Budgets: TypeAlias = Mapping[int | None, float | None]


class Searches:
    """Searches whose steps, in ms, are given for each memory budget of compiled Spans; None where nothing fits."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, ample: float, by_budget: dict[int | None, float | None]
    ) -> None:
        self.asked: list[int | None] = []
        self._ample, self._by_budget = ample, by_budget
        net, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
        variant = Variant(Sample(net, (x,), {}, CPU, 8, (1,)), BatchRows((8,), True))
        gpu = cast("torch.device", SimpleNamespace(type="cuda"))
        self._request = Request(variant, [x], Config(), None, gpu, 8, gather_inputs=True)
        cluster = Cluster.preset("cpu", 1, 1)
        self._plan = content(search(replace(self._request, device=CPU), cluster, [], 1))
        monkeypatch.setattr(decision, "find_profiles", self._measure)
        monkeypatch.setattr(decision, "own_device", lambda _: RankDevice("cpu", GIB, False, "here"))
        monkeypatch.setattr(attempts, "search", self._search)
        monkeypatch.setattr(attempts, "has_compiler_of_host", lambda: True)

    def _measure(self, request: Request, cluster: Cluster, hosts: object, percent: int | None) -> list[int | None]:
        self.asked.append(percent)
        return [percent]

    def _search(
        self, request: Request, cluster: Cluster, profiles: list[int | None], world_size: int, *, tells: bool = True
    ) -> Plan:
        own = Cluster.of_ranks([("cpu", GIB // world_size, False, "here")] * world_size)
        is_ample = cluster.to_toml() != own.to_toml()
        assert tells is not is_ample
        step_ms = self._ample if is_ample else self._by_budget[profiles[0]]
        if step_ms == 0:
            raise PlanError("the time is over")
        if step_ms is None:
            raise MemoryShortageError(f"short with {profiles[0]}")
        predicted = {**self._plan["predicted"], "step_us": 1e3 * step_ms}
        return Plan.seal(json.dumps({**self._plan, "memory_budget_percent": profiles[0], "predicted": predicted}))

    def budget(self) -> int | None:
        """That of the Plan that is decided on."""
        found: int | None = content(decision.decide(self._request, None)).get("memory_budget_percent")
        return found


@pytest.mark.parametrize(
    ("ample", "by_budget", "budget", "asked"),
    [
        (10, {None: 10.1}, None, [None]),
        (10, {None: 15, 80: 10.1}, 80, [None, 80]),
        (10, {None: 15, 80: 12, 30: 11, 0: 14}, 30, [None, 80, 30, 0]),
        (10, {None: 15, 80: 12, 30: 11.9}, 80, [None, 80, 30]),
        (10, {None: 15, 80: 14.9, 30: 11, 0: 14}, 30, [None, 80, 30, 0]),
        (10, {None: 15, 80: None, 30: 14.9, 0: 16}, None, [None, 80, 30, 0]),
        (10, {None: None, 80: None, 30: 13, 0: 13.2}, 30, [None, 80, 30, 0]),
        # The time is over in a later search, and in the one with ample memory.
        (10, {None: 15, 80: 12, 30: 0}, 80, [None, 80, 30]),
        (0, {None: 15}, None, [None]),
        (10, {None: None, 80: None, 30: None, 0: 13}, 0, [None, 80, 30, 0]),
    ],
)
def test_spans_keep_less_as_long_as_that_makes_steps_faster(
    monkeypatch: pytest.MonkeyPatch,
    ample: float,
    by_budget: Budgets,
    budget: int | None,
    asked: list[int | None],
) -> None:
    searches = Searches(monkeypatch, ample, by_budget)
    assert searches.budget() == budget
    assert searches.asked == asked


def decided() -> tuple[int | None, list[int | None]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        searches = Searches(monkeypatch, 10, {None: 15, 80: None, 30: 11, 0: 14})
        return searches.budget(), searches.asked


def test_all_ranks_measure_under_the_budgets_that_rank_0_asks_for(ranks: Ranks) -> None:
    assert ranks(2).run(decided) == [(30, [None, 80, 30, 0])] * 2


def test_where_nothing_fits_the_leanest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch, 10, dict.fromkeys((None, 80, 30, 0)))
    with pytest.raises(MemoryShortageError, match="short with 0"):
        searches.budget()


def test_mistakes_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = Searches(monkeypatch, 10, {})

    def mistaken(*_: Any) -> Plan:
        raise PlanError("stages must be from 1 to 1 ranks")

    monkeypatch.setattr(attempts, "search", mistaken)
    with pytest.raises(PlanError, match="stages must"):
        searches.budget()
    assert searches.asked == [None]
