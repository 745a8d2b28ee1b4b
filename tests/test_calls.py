"""Calls that not all ranks make, and ranks that are lost in one, with real process groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import Ended, run_programs

TORCHRUN = str(Path(sys.executable).parent / "torchrun")

# All ranks have made two training steps with two modules when a case begins; every rank is one Stage of both.
SCRIPT = """
import os, pathlib, signal, sys, threading, time
import torch
import pyrannc

case, rank = sys.argv[1], int(os.environ["RANK"])
armed = False

@torch.library.custom_op("calls::boom", mutates_args=())
def boom(x: torch.Tensor) -> torch.Tensor:
    if armed:
        raise ValueError
    return x.clone()

boom.register_fake(torch.empty_like)
boom.register_autograd(lambda ctx, grad: grad)

class Boom(torch.nn.Linear):
    def forward(self, x):
        return boom(super().forward(x))

def make(*names):
    named = {name: Boom(8, 8) for name in names}
    module = torch.nn.Sequential()
    for name, layer in named.items():
        module.add_module(name, layer)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return pyrannc.RaNNCModule(module, optimizer), optimizer

model, optimizer = make("first", "last")
other, _ = make("front", "back")
x = torch.randn(4, 8)
if case == "right":
    coming = pathlib.Path(sys.argv[0] + ".coming")
    if rank == 1:
        coming.touch()
    else:
        while not coming.exists():
            time.sleep(0.1)
        time.sleep(4)
for _ in range(2):
    model(x).square().mean().backward()
    other(x).square().mean().backward()
optimizer.step()

if case == "killed":
    if rank == 1:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        model(x)
elif case == "state_dict on one":
    if rank == 0:
        model.state_dict()
    model(x)
elif case == "left":
    if rank == 0:
        model(x)
elif case == "late":
    with torch.no_grad():
        if rank == 0:
            time.sleep(60)
        model(x)
elif case == "failed":
    armed = rank == 1
    model(x)
elif case == "right":
    model.get_param("first.weight"), model.get_param_grad("first.weight")
    model.load_state_dict(model.state_dict(rank0_only=False))
    optimizer.load_state_dict(optimizer.state_dict(from_global=True), from_global=True)
    model.clip_grad_norm(1.0)
    model.report()
    pyrannc.barrier()
    buffer = torch.zeros(2)
    pyrannc.all_gather(torch.tensor([float(rank)]), buffer)
    assert buffer.tolist() == [0, 1]
    if rank == 0:
        time.sleep(4)
    model(x)
    model.undeploy()
    print("right")
"""

LIMITS = {"RANNC_DIFFERENT_CALLS_TIMEOUT_S": "1", "RANNC_LATE_NOTICE_S": "2"}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, case: str, **limits: str) -> list[Ended]:
    """Runs a case on two ranks that nobody ends but the ranks themselves."""
    return run_programs(2, sys.executable, str(script), case, env=variables() | limits, timeout_s=200)


def start_with_torchrun(script: Path, case: str) -> tuple[str, str]:
    """Runs a case on two ranks; returns what each has written to stderr."""
    logs = script.parent / "logs"
    # The launcher looks seldom, so that it does not end the survivor in the middle of its traceback.
    options = ["--standalone", "--nproc-per-node=2", "--monitor-interval=5", f"--log-dir={logs}", "--redirects=3"]
    done = subprocess.run(
        [TORCHRUN, *options, str(script), case],
        env={**os.environ, **variables()},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    first, second = (next(logs.glob(f"*/attempt_0/{rank}/stderr.log")).read_text() for rank in range(2))
    return first, second


def variables() -> dict[str, str]:
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RANNC_PARTITION_NUM": "2",
        "RANNC_LOG": "error",
        **LIMITS,
    }


def last_line(stderr: str) -> str:
    return stderr.rstrip().rpartition("\n")[2]


def says(stderr: str, cause: str) -> bool:
    """True if the end of the job is the last that is said: as an exception, or where none comes out, as a line."""
    return re.fullmatch(rf"(.*pyrannc\.errors\.PeerError|RaNNC): {cause}.*", last_line(stderr)) is not None


def test_a_killed_rank_is_the_error_of_the_call(script: Path) -> None:
    survivor, _ = start_with_torchrun(script, "killed")
    assert says(survivor, r"rank 1 died(; when last heard of, it| while it) was (in|outside)"), survivor
    assert "PeerError" in last_line(survivor)
    assert "The above exception was the direct cause of the following exception" in survivor


def test_state_dict_on_one_rank(script: Path) -> None:
    cause = "rank 0 waits in state_dict(), rank 1 in model(...): both must be called by all ranks, in the same order"
    for stderr in start_with_torchrun(script, "state_dict on one"):
        assert says(stderr, re.escape(cause)), stderr


def test_a_rank_that_stops_early(script: Path) -> None:
    waiter, leaver = start(script, "left")
    assert leaver.status == 0
    assert waiter.status != 0
    assert says(waiter.stderr, r"rank 1 has left \(its script ended\) while rank 0 waits in model\(...\)"), (
        waiter.stderr
    )
    assert "PeerError" in last_line(waiter.stderr)


def test_a_rank_that_does_not_come(script: Path) -> None:
    late, waiter = start(script, "late", RANNC_STALL_TIMEOUT_S="10")
    notice = "RaNNC: rank 0 has not come to model(...) for 2 s; rank 1 waits there. It must be called by all ranks; "
    assert notice + "without progress the job ends after 10 s (stall_timeout_s)\n" in late.stderr
    places = "rank 0 is outside of any collective call, rank 1 is in model(...)"
    for ended in (late, waiter):
        assert ended.status != 0
        assert says(ended.stderr, re.escape(f"rank 1 has made no progress for 10 s (stall_timeout_s): {places}"))


def test_a_failure_names_the_action_of_its_own_module(script: Path) -> None:
    waiter, failed = start(script, "failed")
    assert failed.status != 0
    assert last_line(failed.stderr).endswith("ValueError")
    place = 'in model(...), at "forward of microbatch 0, Stage 1 (last)"'
    assert says(waiter.stderr, re.escape(f"rank 1 failed {place}: ValueError")), waiter.stderr
    assert "ValueError:" not in waiter.stderr


def test_calls_of_all_ranks_go_through(script: Path) -> None:
    late, other = start(script, "right")
    assert (late.status, late.stdout, other.status, other.stdout) == (0, "right\n", 0, "right\n")
    assert "RaNNC: rank 1 waits in model(...) for other ranks' first call of RaNNC for 2 s. It must be" in other.stderr
    assert "RaNNC: rank 0 has not come to model(...) for 2 s; rank 1 waits there. " in late.stderr
