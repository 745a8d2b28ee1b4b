"""Programs under launchers, and what becomes of all ranks when one ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyrannc._native import Watchdog
from tests.ranks import Ended, run_programs

from .launched import FAILING_RANK

PROGRAMS = Path(sys.executable).parent
PROGRAM = [sys.executable, "-m", "tests.runtime.launched"]
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
LAUNCHERS = {
    "torchrun": [str(PROGRAMS / "torchrun"), "--standalone", "--nproc-per-node=2", "-m", "tests.runtime.launched"],
    "mpirun": [str(PROGRAMS / "mpirun"), "--oversubscribe", "-np", "2", *PROGRAM],
    "none": PROGRAM,
}


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_trains_under(launcher: str) -> None:
    done = subprocess.run(
        LAUNCHERS[launcher],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size = 1 if launcher == "none" else 2
    expected = [f"rank {rank} of {size}: no differences" for rank in range(size)]
    assert sorted(done.stdout.splitlines()) == expected, done.stdout + done.stderr


def ended(how: str) -> tuple[Ended, list[Ended]]:
    """The rank that ends first, and the others."""
    ranks = run_programs(3, *PROGRAM, how, env=ENVIRONMENT)
    return ranks.pop(FAILING_RANK), ranks


def assert_told(others: list[Ended], cause: str) -> None:
    for other in others:
        assert other.status == Watchdog.EXIT_STATUS, other.stderr
        told = re.search(rf"(RaNNC|PeerError): rank {FAILING_RANK} {re.escape(cause)}", other.stderr)
        assert told, other.stderr
        assert told[1] == "PeerError" or "All ranks stop." in other.stderr
        assert "no differences" not in other.stdout


def test_a_rank_that_is_killed_in_a_step_ends_all() -> None:
    killed, others = ended("killed")
    assert killed.status == -9
    assert_told(others, 'died while it was in loss.backward(), at "backward of microbatch 1, Stage 1 (')
    for other in others:
        assert other.after_s - killed.after_s < 60


def test_a_rank_that_raises_in_a_step_ends_all() -> None:
    raised, others = ended("raises")
    assert raised.status != 0
    assert "ValueError: boom" in raised.stderr
    assert_told(others, 'failed in loss.backward(), at "backward of microbatch 1, Stage 1 (')
    for other in others:
        assert "ValueError: boom" in other.stderr
        assert other.after_s - raised.after_s < 60
