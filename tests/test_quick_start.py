"""The README's quick start as a user starts it: what it prints, what is logged, what a second start finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
STEPS = 10


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (found,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "train.py"
    path.write_text(found)
    return path


def start(*command: object, **variables: object) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RANNC_")}
    given = {name: str(value) for name, value in variables.items()}
    environment = {**inherited, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **given}
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=240, check=False)


def phases(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What rank 0 said of each phase, by name, in order."""
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [re.sub(r"\d+\.\d{4}", "x", line) for line in printed] == [
        f"rank 0, step {step}: loss x of its own rows" for step in range(STEPS)
    ]
    return dict(re.findall(r"\[info\] \[rank 0\] (\w+): \d+\.\d\d s \((.*)\)", done.stderr))


def test_each_phase_of_the_first_call_has_a_line(script: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    missing = tmp_path / "missing" / "plan.json"
    asked = {"RANNC_PROFILE": "always", "RANNC_PROFILE_CACHE_DIR": cache, "RANNC_SAVE_DEPLOYMENT": 1}
    first = start(*TORCHRUN, script, RANNC_DEPLOYMENT_FILE=missing, **asked)
    told = phases(first)
    assert list(told) == ["join", "capture", "comparison", "profile", "plan", "parameters"]
    assert told["join"] == "rank 0 of 2 on cpu, started by torchrun"
    assert told["capture"] == "Sequential: 3 ops, 4 parameters with 2,099,712 elements"
    assert told["comparison"].endswith(
        "compared with the model on 2 rows of the first batch: equal outputs and gradients."
    )
    assert re.fullmatch(rf"measured \d distinct blocks of \d; kept in {cache}/\w+.json", told["profile"])
    kept = Path(told["profile"].rpartition(" ")[2])
    assert kept in cache.iterdir()
    # What follows depends on what was measured: a plan that is barely faster is told.
    assert re.match(r"searched for 2 ranks and a global batch of 128 rows(;|$)", told["plan"])
    assert re.fullmatch(r"this rank holds [48]\.0 MiB", told["parameters"])
    # All of the training went on, although the plan could not be kept.
    assert first.stderr.count(f"[warning] [rank 0] cannot write the plan file {missing}") == 1

    plan = tmp_path / "plan.json"
    again = phases(start(*TORCHRUN, script, RANNC_DEPLOYMENT_FILE=plan, **asked))
    assert again["profile"] == f"from the cache, {kept}"
    assert plan.exists()


def test_one_process_is_told_as_one(script: Path) -> None:
    told = phases(start(sys.executable, script))
    assert told["join"] == "rank 0 of 1 on cpu"
    assert told["profile"] == "nothing is measured: estimates serve"
    assert told["plan"] == "searched for 1 rank and a global batch of 64 rows"
