"""Profiles of whole models: measured once, kept, shared out, and used."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

import pyrannc
from pyrannc._native import Profile
from pyrannc.errors import ProfileError
from pyrannc.job import process
from pyrannc.job.phases import phase
from pyrannc.profile.block import BlockCode
from pyrannc.profile.cache import ProfileCache, default_folder
from pyrannc.profile.conditions import Conditions, conditions
from pyrannc.profile.profiler import Subject, profile
from tests.ranks import RankPool
from tests.runtime.equivalence import Case, check, environment

from .models import CPU, WIDTH, Layers, subject


@pytest.fixture(scope="module")
def layers() -> Subject:
    return subject(Layers(), [torch.randn(4, WIDTH)], (1, 4))


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What RaNNC has logged since the last question."""

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name.startswith("pyrannc")]
        caplog.clear()
        return found

    with caplog.at_level(logging.DEBUG, logger="pyrannc"):
        yield take


def count(lines: list[str], text: str) -> int:
    return sum(text in line for line in lines)


Lines = Callable[[], list[str]]


def test_equal_blocks_and_spans_are_measured_once(layers: Subject, lines: Lines) -> None:
    (measured,) = profile(layers, CPU, ProfileCache(None))
    hashes, spans = layers.blocks.hashes, layers.spans.hashes
    # First and last layer, and tanh and linear between them, of which there are many.
    assert len(hashes) == 15
    assert len(set(hashes)) == 4
    # The first layer and the last one with the tanh beside it; what is between them are Blocks.
    assert len(spans) == 13
    assert len(set(spans) - set(hashes)) == 2
    assert count(lines(), "measured") == 6
    assert set(measured.block_hashes) == {*hashes, *spans}


def test_blocks_are_compiled_where_they_are_spans(layers: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_none(code: BlockCode, rows: int, feeds: object) -> bool:
        compiled.append(code)
        return False

    monkeypatch.setattr(BlockCode, "compile", compile_none)
    profile(layers, CPU, ProfileCache(None))
    # Not the two Blocks that stand in a longer Span alone.
    assert len(compiled) == len(set(layers.spans.hashes)) == 4


def test_a_profile_survives_its_file(layers: Subject, tmp_path: Path) -> None:
    (measured,) = profile(layers, CPU, ProfileCache(tmp_path))
    (file,) = tmp_path.iterdir()
    again = Profile.read(file)
    assert again.to_json() == measured.to_json()
    assert (again.graph_hash, again.device) == (layers.graph_hash, "cpu")
    assert again.versions == {
        "pyrannc": pyrannc.__version__,
        "torch": torch.__version__,
        "working copies": "once a step",
        "backwards": "whole and in two parts",
        "updates": "alone, of random numbers",
        "links": "as Stages send, beside the leading Span",
    }
    points = json.loads(again.to_json())["blocks"]
    assert all([point["rows"] for point in block] == [1, 4] for block in points.values())


def test_the_second_start_measures_nothing(layers: Subject, tmp_path: Path, lines: Lines) -> None:
    (measured,) = profile(layers, CPU, ProfileCache(tmp_path))
    assert count(lines(), "measured") == 6
    with phase("DPStaging", "profile", "the measurement"):
        (again,) = profile(layers, CPU, ProfileCache(tmp_path))
    (told,) = lines()
    assert re.fullmatch(rf"profile: \d+\.\d\d s \(from the cache, {tmp_path}/\w+\.json\)", told)
    assert again.to_json() == measured.to_json()


def cut_short(text: str) -> str:
    return text[: len(text) // 2]


def altered(text: str) -> str:
    return text.replace('"rows": 4', '"rows": 5', 1)


def negative(text: str) -> str:
    return text.replace('"forward_us": ', '"forward_us": -', 1)


def of_another_schema(text: str) -> str:
    return text.replace('"schema": 2', '"schema": 99', 1)


def emptied(text: str) -> str:
    return ""


@pytest.mark.parametrize("damage", [cut_short, altered, negative, of_another_schema, emptied])
def test_a_damaged_file_is_ignored_with_a_warning(
    layers: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[str], str]
) -> None:
    cache = ProfileCache(tmp_path)
    (measured,) = profile(layers, CPU, cache)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert damage(text) != text
    file.write_text(damage(text))
    caplog.clear()
    (again,) = profile(layers, CPU, cache)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in warning
    assert again.block_hashes == measured.block_hashes
    # It has been written anew.
    assert Profile.read(file).to_json() == again.to_json()


def test_a_file_under_another_ones_name_is_ignored(
    layers: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ProfileCache(tmp_path)
    profile(layers, CPU, cache)
    (file,) = tmp_path.iterdir()
    other = subject(Layers(3), [torch.randn(4, WIDTH)], (1, 4))
    profile(other, CPU, cache)
    (second,) = set(tmp_path.iterdir()) - {file}
    file.write_text(second.read_text())
    caplog.clear()
    (again,) = profile(layers, CPU, cache)
    assert "measured for something else" in caplog.text
    assert again.graph_hash == layers.graph_hash


def other_graph(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    return subject(Layers(7), [torch.randn(4, WIDTH)], (1, 4))


def more_rows(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    return replace(layers, row_counts=(1, 8))


def replayed(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    return replace(layers, spans=replace(layers.spans, source=replace(layers.spans.source, replayed=True)))


def other_version(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    request.getfixturevalue("monkeypatch").setattr(torch, "__version__", "99.0")
    return layers


def other_precision(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    products: Any = torch.backends.mkldnn.matmul
    assert products.fp32_precision == "none"
    # The switch is a property, which monkeypatch cannot take back.
    request.addfinalizer(lambda: setattr(products, "fp32_precision", "none"))
    products.fp32_precision = "bf16"
    return layers


def other_kernels(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    request.getfixturevalue("monkeypatch").setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    return layers


def other_threads(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(threads + 1)
    return layers


def deterministic(layers: Subject, request: pytest.FixtureRequest) -> Subject:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(mode=False))
    torch.use_deterministic_algorithms(mode=True)
    return layers


@pytest.mark.parametrize(
    "change",
    [other_graph, more_rows, replayed, other_version, other_precision, other_kernels, other_threads, deterministic],
)
def test_what_changes_the_cost_is_measured_anew(
    layers: Subject,
    tmp_path: Path,
    lines: Lines,
    request: pytest.FixtureRequest,
    change: Callable[[Subject, pytest.FixtureRequest], Subject],
) -> None:
    cache = ProfileCache(tmp_path)
    profile(layers, CPU, cache)
    changed = change(layers, request)
    lines()
    profile(changed, CPU, cache)
    assert count(lines(), "measured") >= 4
    assert len(list(tmp_path.iterdir())) == (1 if change is more_rows else 2)


def test_what_changes_no_cost_measures_nothing(
    layers: Subject, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProfileCache(tmp_path)
    profile(layers, CPU, cache)
    told = {"NCCL_DEBUG": "INFO", "MASTER_PORT": "29511", "NCCL_COMM_ID": "10.0.0.1:1234"}
    for name, value in (told | {"NCCL_P2P_DISABLE": "1"}).items():
        monkeypatch.setenv(name, value)
    lines()
    profile(layers, CPU, cache)
    profile(replace(layers, row_counts=(1, 2)), CPU, cache)
    assert count(lines(), "measured") == 0


def test_a_folder_that_cannot_be_written_is_no_failure(
    layers: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    (measured,) = profile(layers, CPU, ProfileCache(tmp_path / "file" / "folder"))
    assert measured.block_hashes
    assert "not kept for the next start" in caplog.text


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "pyrannc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "pyrannc"


def test_random_numbers_of_the_user_stay(layers: Subject) -> None:
    dropout = subject(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), [torch.randn(4, WIDTH)], (4,))
    before = torch.get_rng_state()
    profile(dropout, CPU, ProfileCache(None))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_is_profiled_like_training(layers: Subject, mode: Callable[[], Any]) -> None:
    with mode():
        samples = [torch.randn(4, WIDTH)]
        blocks, spans = (
            replace(runs, source=replace(runs.source, samples=samples)) for runs in (layers.blocks, layers.spans)
        )
        given = replace(layers, blocks=blocks, spans=spans)
        (measured,) = profile(given, CPU, ProfileCache(None))
    points = json.loads(measured.to_json())["blocks"]
    assert set(points) == {*layers.blocks.hashes, *layers.spans.hashes}
    assert all(block[-1]["backward_us"] > 0 for block in points.values())


# Several ranks

ALWAYS = {"RANNC_PROFILE": "always"}
Ranks = Callable[[int], RankPool]


def measure_together(folder: str, links: str = "") -> tuple[int, str]:
    """How many Blocks this rank has measured, and rank 0's Profile."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = records.append  # type: ignore[method-assign]  # a handler that keeps what it gets
    logger = logging.getLogger("pyrannc.DPStaging")
    process.ensure_process_group()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        torch.manual_seed(0)
        whole = subject(Layers(), [torch.randn(4, WIDTH)], (1, 4))
        hosts = ("here",) * process.get_world_size()
        with environment({"GLOO_MODE": links} if links else {}):
            found = profile(replace(whole, hosts=hosts), CPU, ProfileCache(Path(folder)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.ERROR)
    return count([record.getMessage() for record in records], " measured"), "".join(one.to_json() for one in found)


def test_ranks_share_the_work(ranks: Ranks, tmp_path: Path) -> None:
    (first, text), (second, nothing) = ranks(2).run(measure_together, str(tmp_path))
    assert (first, second) == (3, 3)
    assert nothing == ""
    measured = json.loads(text)
    assert len(measured["blocks"]) == 6
    (level,) = measured["levels"]
    assert level["name"] == "loopback"
    figures = [level[kind][figure] for kind in ("send", "collective") for figure in ("latency_us", "bytes_per_s")]
    assert all(figure > 0 for figure in figures)
    again = ranks(2).run(measure_together, str(tmp_path))
    assert again == [(0, text), (0, "")]
    (_, others), _ = ranks(2).run(measure_together, str(tmp_path), "other")
    assert json.loads(others)["blocks"] == measured["blocks"]
    assert json.loads(others)["levels"] != measured["levels"], "links of another environment are measured anew"
    ((alone, on_one),) = ranks(1).run(measure_together, str(tmp_path))
    assert (alone, json.loads(on_one)["blocks"]) == (0, measured["blocks"]), "Blocks are known on one device as well"
    assert json.loads(on_one)["levels"] == []


def test_a_model_trains_as_ever_under_a_measured_plan(ranks: Ranks, tmp_path: Path) -> None:
    for case in (Case("chain", (4, 4), stages=2, microbatches=2), Case("bert", (3, 2), stages=2, microbatches=3)):
        env = {**ALWAYS, "XDG_CACHE_HOME": str(tmp_path)}
        assert ranks(2).run(check, case, str(tmp_path), env=env) == [[], []]
    # One for each model, and one of the links.
    assert len(list((tmp_path / "pyrannc").iterdir())) == 3


def test_randomness_does_not_depend_on_profiling(ranks: Ranks, tmp_path: Path) -> None:
    def outputs(profile: str) -> Any:
        return ranks(2).run(run_dropout, env={"RANNC_PROFILE": profile, "XDG_CACHE_HOME": str(tmp_path)})

    # Measured times may lead to another plan, which rounds otherwise; other masks would show in whole terms.
    for measured, estimated in zip(outputs("always"), outputs("never"), strict=True):
        assert measured == pytest.approx(estimated, rel=1e-5)


def run_dropout() -> list[float]:
    torch.manual_seed(3)
    module = pyrannc.RaNNCModule(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    output = module(torch.ones(4, 8))
    module.undeploy()
    values: list[float] = output.flatten().tolist()
    return [*values, *torch.rand(3).tolist()]


def run_once(layers: int) -> str:
    """The message of the error that a first call raises, if any."""
    torch.manual_seed(0)
    module = pyrannc.RaNNCModule(Layers(layers))
    try:
        module(torch.randn(2, WIDTH))
    except ProfileError as error:
        return str(error)
    module.undeploy()
    return ""


def test_a_profile_is_saved_and_loaded_on_demand(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    env = {"RANNC_GRAPH_PROFILE_FILE": str(file), "RANNC_PROFILE_CACHE": "0"}
    assert ranks(2).run(run_once, 2, env={**env, "RANNC_SAVE_GRAPH_PROFILE": "1"}) == ["", ""]
    assert Profile.read(file).device == "cpu"
    load = {**env, "RANNC_LOAD_GRAPH_PROFILE": "1"}
    assert ranks(2).run(run_once, 2, env=load) == ["", ""]
    mismatch, told = ranks(2).run(run_once_or_mismatch, 3, env=load)
    assert "another model" in mismatch
    assert "rank 0 cannot go on" in told
    os.truncate(file, 100)
    damaged, _ = ranks(2).run(run_once_or_mismatch, 2, env=load)
    assert "not JSON" in damaged


def run_once_or_mismatch(layers: int) -> str:
    try:
        return run_once(layers)
    except pyrannc.RaNNCError as error:
        return str(error)


def test_a_bad_folder_for_the_profile_ends_no_training(ranks: Ranks, tmp_path: Path) -> None:
    env = {"RANNC_GRAPH_PROFILE_FILE": str(tmp_path / "missing" / "file"), "RANNC_SAVE_GRAPH_PROFILE": "1"}
    assert ranks(2).run(run_once, 1, env={**env, "RANNC_PROFILE_CACHE": "0"}) == ["", ""]


def test_a_memory_budget_of_the_user_is_not_one_that_planning_tries() -> None:
    def found(percent: int | None, budget: float = 1.0) -> Conditions:
        with functorch_config.patch(activation_memory_budget=budget):
            return conditions(CPU, fused_dropout=True, compiled=True, memory_budget_percent=percent)

    apart = [found(None), found(80), found(1), found(0), found(None, 0.8), found(None, 0.004), found(None, 0.0)]
    assert len(set(apart)) == len(apart)
    # What links take does not depend on it.
    assert len({kind.of_links() for kind in apart}) == 1
