"""The classes of ``pyrannc.core`` against what the native core writes and reads.

A field that is new or renamed in Rust fails here until its class reads it, or ``UNREAD`` says that none does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from pyrannc._native import Buckets, Cluster, Graph, Plan, Profile, Program
from pyrannc.capture import CaptureOptions, capture
from pyrannc.core.buckets import BucketsFacts
from pyrannc.core.graph import GraphFacts
from pyrannc.core.partition import Parts
from pyrannc.core.plan import PlanFacts
from pyrannc.core.profile import Links, ProfileFacts
from pyrannc.core.program import Call, RankProgram
from pyrannc.core.settings import Capabilities, Limits, SearchSettings
from pyrannc.core.tail import DividedFacts
from pyrannc.errors import PlanError
from pyrannc.profile.cache import ProfileCache
from pyrannc.profile.profiler import profile
from tests.profile.models import WIDTH, Layers, subject

CPU = torch.device("cpu")
ROWS = 8

UNREAD = {
    "graph": {
        "schema",
        "name",
        "training",
        "sample_rows",
        "values[].def",
        "ops[].target",
        "ops[].args[].bool",
        "ops[].args[].dim.fixed",
        "ops[].args[].float",
        "ops[].args[].int",
        "ops[].args[].str",
        "ops[].module",
        "ops[].source",
        "buffers[].aliases",
        "constants[].name",
        "constants[].data",
    },
    "divided": set(),
    "partition": {
        "outputs[].index",
        "outputs[].requires_grad",
        "tied",
        "stages[].prologue.recompute",
        "stages[].spans[].recompute",
    },
    "buckets": {"gradients", "buckets[].dtype", "buckets[].bytes", "buckets[].gathered"},
    "rank view": {"seats[].replica"},
    "plan": {
        "schema",
        "pyrannc",
        "graph_hash",
        "graph_name",
        "precision",
        "stages[].ops",
        "stages[].blocks[].ops",
        "stages[].blocks[].hash",
        "stages[].bucket_bytes",
        "stages[].feeds",
        "stages[].predicted.transfer_us",
        "stages[].predicted.in_bytes",
        "stages[].predicted.out_bytes",
        "predicted.lower_bound_us",
        "checksum",
    },
    "profile": {
        "schema",
        "graph_hash",
        "device",
        "precision",
        "versions",
        "update",
        "collective_slowdown",
        "message_slowdown",
        "memory_budget_percent",
        "checksum",
    },
    "settings": {"may_idle", "threads", "gains"},
    "capabilities": {"offload"},
    "limits": {"candidates"},
}
"""What the native core writes, or takes, and no class reads, or gives."""

BY_NAME = {"ops[].kwargs", "blocks"}
"""Objects whose keys are names of something."""


class Everything(nn.Module):
    """Whatever makes a field of the Graph appear: names twice, work in place, keyword arguments, chance, state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.also = self.norm
        self.fixed = torch.ones(WIDTH)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.calls = self.calls + 1
        x = self.norm(self.first(given)).mul_(2.0)
        x = nn.functional.dropout(torch.cat([x, x], dim=1)[:, :WIDTH], 0.5) + self.fixed
        x = torch.vmap(torch.sin)(nn.functional.gelu(x, approximate="tanh"))
        with torch.no_grad():
            mean = x.mean()
        return self.last(x), mean, given


class Read(dict[str, Any]):
    """A JSON object that notes which of its keys are asked for."""

    def __init__(self, path: str, content: dict[str, Any], asked: set[str]) -> None:
        super().__init__(content)
        self._path = path
        self._asked = asked

    def _note(self, key: str) -> None:
        self._asked.add(_key(self._path, key))

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def items(self) -> Any:
        for key in self:
            self._note(key)
        return super().items()

    def values(self) -> Any:
        for key in self:
            self._note(key)
        return super().values()


def _key(path: str, key: str) -> str:
    # An argument with a name, or in a list, is one like all others.
    path = path.replace("ops[].kwargs.*", "ops[].args[]").replace(".list[]", "")
    key = "*" if path in BY_NAME else key
    return f"{path}.{key}" if path else key


def watched(content: Any, path: str, there: set[str], asked: set[str]) -> Any:
    """The same content; ``there`` gets the paths of all keys, ``asked`` those that are asked for."""
    if isinstance(content, list):
        return [watched(item, f"{path}[]", there, asked) for item in content]
    if not isinstance(content, dict):
        return content
    there.update(_key(path, key) for key in content)
    found = {key: watched(item, _key(path, key), there, asked) for key, item in content.items()}
    return Read(path, found, asked)


def unread(there: set[str], asked: set[str]) -> set[str]:
    """The keys that are not asked for, without what stands under such a key."""
    found = there - asked
    return {key for key in found if not any(key.startswith((f"{other}.", f"{other}[]")) for other in found)}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[Callable[[], Any]]], None]:
    """Demands that readers, together, ask for all keys that are there but the unread ones, and for no others."""
    parse = json.loads

    def demand(what: str, readers: list[Callable[[], Any]]) -> None:
        there: set[str] = set()
        asked: set[str] = set()
        with monkeypatch.context() as patch:
            patch.setattr(json, "loads", lambda text: watched(parse(text), "", there, asked))
            for reader in readers:
                reader()
        assert there, "something was read"
        assert unread(there, asked) == UNREAD[what]
        assert asked - there == set(), "asked for, but never there"

    return demand


@pytest.fixture(scope="module")
def graph_json() -> str:
    options = CaptureOptions(row_wise_modules=("first",))
    return capture(Everything(), [torch.randn(ROWS, WIDTH)], {}, device=CPU, rows=ROWS, options=options).graph_json


@pytest.fixture(scope="module")
def graph(graph_json: str) -> Graph:
    return Graph.from_json(graph_json)


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    # Rows that do not divide make microbatches of two sizes.
    settings = SearchSettings(world_size=2, batch_rows=ROWS + 2, microbatches=2, stages=2)
    content = {
        "graph_hash": graph.hash(),
        "device": "cpu",
        "precision": "",
        "versions": {},
        "blocks": {},
        "update": None,
    }
    measured = Profile.seal(
        json.dumps({**content, "eager_spans": ["s1"], "memory_budget_percent": 80, **asdict(Links())})
    )
    return Plan.search(graph, Cluster.preset("cpu", 1, 2), [measured], settings.to_json())


def test_every_field_of_the_graph_is_read_or_known(graph_json: str, read: Any) -> None:
    read("graph", [lambda: GraphFacts.from_json(graph_json, Graph.from_json(graph_json).row_dims())])


class Mixing(nn.Module):
    """Whatever makes a field of a divided Graph appear."""

    def forward(self, given: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        x = given * 2
        return (x - x.mean(0)) / counted.sum(), x.sum()


def test_every_field_of_a_divided_graph_is_read_or_known(read: Any) -> None:
    samples = [torch.randn(ROWS, WIDTH), torch.ones(ROWS)]
    divided = Graph.from_json(capture(Mixing(), samples, {}, device=CPU, rows=ROWS).graph_json).divide_tail("batch")
    read("divided", [lambda: DividedFacts.from_json(divided.to_json())])


def test_every_field_of_the_plan_is_read_or_known(plan: Plan, read: Any) -> None:
    read("plan", [lambda: PlanFacts.of(plan)])
    content = json.loads(plan.to_json())
    for stage, found in zip(PlanFacts.of(plan).stages, content["stages"], strict=True):
        assert stage.predicted.memory.total_bytes == sum(found["predicted"]["memory"].values())


def test_every_field_of_the_partition_is_read_or_known(graph: Graph, plan: Plan, read: Any) -> None:
    partition = plan.partition(graph)
    read("partition", [lambda: Parts.from_json(partition.to_json())])


def all_buckets(graph: Graph, plan: Plan) -> Buckets:
    params = range(len(json.loads(graph.to_json())["params"]))
    return Buckets.divide(
        plan,
        plan.partition(graph),
        graph,
        trained=params,
        everywhere=[],
        reduce_dtype="float32",
        undivided=[],
        whole_gradients=[],
        by_element=True,
    )


def test_every_field_of_the_buckets_is_read_or_known(graph: Graph, plan: Plan, read: Any) -> None:
    buckets = all_buckets(graph, plan)
    read("buckets", [lambda: BucketsFacts.from_json(buckets.to_json())])


def test_every_field_of_a_rank_s_program_is_read_or_known(graph: Graph, plan: Plan, read: Any) -> None:
    partition = plan.partition(graph)
    buckets = all_buckets(graph, plan)
    programs = [Program.build(plan, partition, buckets, [ROWS // 2] * 2, True, call) for call in get_args(Call)]
    views = [program.rank_view(rank) for program in programs for rank in range(2)]
    read("rank view", [lambda view=view: RankProgram.from_json(view) for view in views])


def test_every_field_of_the_profile_is_read_or_known(read: Any) -> None:
    (measured,) = profile(subject(Layers(2), [torch.randn(ROWS, WIDTH)], (1,)), CPU, ProfileCache(None))
    content = json.loads(measured.to_json())
    link = {"latency_us": 1.0, "bytes_per_s": 1e9}
    content["levels"], content["message_slowdown"] = [{"name": "loopback", "send": link, "collective": link}], 0.25
    content["eager_spans"], content["memory_budget_percent"] = ["s1"], 80
    linked = Profile.seal(json.dumps(content))
    read("profile", [lambda: ProfileFacts.of(linked)])


def test_every_setting_of_the_search_is_given_or_known(graph: Graph) -> None:
    for what, own_class, form in (
        ("settings", SearchSettings, '{"nothing like it": 0}'),
        ("capabilities", Capabilities, '{"capabilities": {"nothing like it": 0}}'),
        ("limits", Limits, '{"limits": {"nothing like it": 0}}'),
    ):
        own, taken = {field.name for field in fields(own_class)}, _fields_in_the_refusal_of(form, graph)
        assert taken - own == UNREAD[what]
        assert own - taken == set()


def _fields_in_the_refusal_of(settings: str, graph: Graph) -> set[str]:
    """The names that the core would have taken instead of one that it does not know."""
    with pytest.raises(PlanError) as refused:
        Plan.search(graph, Cluster.preset("cpu", 1, 1), [], settings)
    _, _, expected = str(refused.value).partition("expected ")
    return set(re.findall("`(\\w+)`", expected))


def test_what_is_left_free_is_not_told() -> None:
    assert json.loads(SearchSettings(world_size=2, batch_rows=8, stages=1).to_json()) == {
        "world_size": 2,
        "batch_rows": 8,
        "stages": 1,
    }
