"""A machine as a cluster file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyrannc._native import Cluster
from pyrannc.calibrate.command import calibrated
from pyrannc.core.profile import LevelPoint, LinkPoint
from tests.ranks import run_programs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_measured_figures_replace_those_of_the_preset() -> None:
    cluster = Cluster.preset("NVIDIA H200", 2, 4)
    _, between = cluster.level_names
    links = [LevelPoint(between, LinkPoint(20.0, 5e10), LinkPoint(30.0, 4e10))]
    curve = [[1e6, 0.5], [1e9, 0.875]]
    device = {"fp32_tflops": 12.5, "action_us": 77.0, "efficiency": {"matrix": {"fp32": curve}, "pointwise": curve}}
    text = calibrated(cluster, {"NVIDIA H200": device}, links)
    before, after = tomllib.loads(cluster.to_toml()), tomllib.loads(text)
    (old,), (new,) = before["device"].values(), after["device"].values()
    assert (new["fp32_tflops"], new["action_us"]) == (12.5, 77.0)
    assert new["efficiency"]["matrix"]["fp32"] == curve
    assert new["efficiency"]["pointwise"] == curve
    assert new["fp64_tflops"] == old["fp64_tflops"]
    assert after["node"] == before["node"]
    assert after["level"][0] == before["level"][0]
    assert after["level"][1] == {
        "name": between,
        "nodes": 2,
        "latency_us": 20.0,
        "gb_per_s": 50.0,
        "collective_latency_us": 30.0,
        "collective_gb_per_s": 40.0,
    }


@pytest.mark.timeout(600)
def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    command = (sys.executable, "-m", "pyrannc", "calibrate", "-o", str(file))
    ended = run_programs(2, *command, env={"OMP_NUM_THREADS": "1"}, timeout_s=300)
    assert [program.status for program in ended] == [0, 0], ended[0].stderr
    cluster = Cluster.read(file)
    assert cluster.devices == 2
    table = tomllib.loads(file.read_text())
    (device,) = table["device"].values()
    assert device["host"]
    for field in ("fp64_tflops", "fp32_tflops", "half_tflops", "memory_gb_per_s", "launch_us", "action_us"):
        assert device[field] > 0
    # The best product is the peak.
    assert max(share for _, share in device["efficiency"]["matrix"]["fp32"]) == pytest.approx(1)
    (level,) = table["level"]
    assert level["gb_per_s"] != tomllib.loads(Cluster.preset("cpu", 1, 2).to_toml())["level"][0]["gb_per_s"]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "cluster.toml"
    first, second = run_programs(2, sys.executable, "-m", "pyrannc", "calibrate", "-o", str(file))
    assert (first.status, second.status) == (1, 1)
    assert f"cannot write {file}: there is no folder {file.parent}" in first.stderr
    assert "rank 0 cannot go on" in second.stderr
