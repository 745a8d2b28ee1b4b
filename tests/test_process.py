"""Joining the other processes, under each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from pyrannc.errors import ConfigError, RaNNCError
from pyrannc.job.launch import Launch, detect_launch

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_")
BIN = Path(sys.executable).parent
TORCHRUN = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2"]

# Prints one line for each rank: the sum of all ranks by both groups, and whether a second use changes anything.
JOIN = """
import torch, torch.distributed as dist
from pyrannc.job import process
assert not dist.is_initialized()
before = process.get_rank(), process.get_world_size()
joined = process.ensure_process_group()
assert before == (joined.rank, joined.world_size) == (dist.get_rank(), dist.get_world_size())
assert process.ensure_process_group() is joined
total = torch.tensor([joined.rank + 1], device=joined.device)
dist.all_reduce(total, group=joined.group)
names = [None] * joined.world_size
dist.all_gather_object(names, joined.rank, group=process.control())
process.barrier()
place = joined.device.type, joined.host
print(f"rank {joined.rank} of {joined.world_size}: {total.item()} {names} {' '.join(place)}\\n", end="", flush=True)
process.barrier()
process.clear()
assert not dist.is_initialized()
"""


def environment(**extra: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | root | extra


def run(*command: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment(**extra))


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


PAIR = ["rank 0 of 2: 3 [0, 1] cpu 127.0.0.1", "rank 1 of 2: 3 [0, 1] cpu 127.0.0.1"]


def rendezvous_files() -> set[Path]:
    return set(Path(tempfile.gettempdir(), f"rannc-{os.getuid()}").glob("*"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "join.py"
    path.write_text(JOIN)
    return path


def test_import_does_nothing() -> None:
    code = "import pyrannc.job.process, torch; assert not torch.distributed.is_initialized()"
    assert lines(run(sys.executable, "-c", code, RANK="x", WORLD_SIZE="y")) == []


def test_one_process(script: Path) -> None:
    done = run(sys.executable, script)
    assert lines(done) == ["rank 0 of 1: 1 [0] cpu 127.0.0.1"]
    assert re.search(r"\[RaNNCProcess\] \[info\] \[rank 0\] join: \d+\.\d\d s \(rank 0 of 1 on cpu\)\n", done.stderr)


def test_torchrun(script: Path) -> None:
    assert lines(run(*TORCHRUN, script)) == PAIR


@pytest.mark.skipif(not (BIN / "mpirun").exists(), reason="Open MPI's wheel is for Linux only")
def test_mpirun(script: Path) -> None:
    before = rendezvous_files()
    assert lines(run(BIN / "mpirun", "--oversubscribe", "-np", "2", sys.executable, script)) == PAIR
    assert rendezvous_files() <= before


def test_srun(script: Path) -> None:
    common = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "2"}
    command = [sys.executable, str(script)]
    tasks = []
    for rank in "01":
        task = environment(SLURM_PROCID=rank, SLURM_LOCALID=rank, **common)
        tasks.append(subprocess.Popen(command, env=task, stdout=subprocess.PIPE, text=True))
    try:
        assert [task.communicate(timeout=120)[0].strip() for task in tasks] == PAIR
    finally:
        for started in tasks:
            started.kill()
            started.wait()


def test_group_of_the_program(tmp_path: Path) -> None:
    script = tmp_path / "existing.py"
    script.write_text("""
import torch.distributed as dist
from pyrannc.job import process
assert process.get_world_size() == 2
dist.init_process_group("gloo")
joined = process.ensure_process_group()
assert joined.group is dist.group.WORLD
process.barrier()
process.clear()
assert dist.is_initialized()
again = process.ensure_process_group()
assert again is not joined
dist.destroy_process_group()
process.clear()
""")
    assert lines(run(*TORCHRUN, script)) == []


def test_group_that_the_program_makes_anew(tmp_path: Path) -> None:
    script = tmp_path / "anew.py"
    script.write_text("""
import torch.distributed as dist
from pyrannc.job import process
first = process.ensure_process_group()
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert process.ensure_process_group().group is dist.group.WORLD
process.clear()
assert dist.is_initialized()
dist.destroy_process_group()
""")
    assert lines(run(sys.executable, script)) == []


def test_mpirun_over_hosts_needs_an_address(script: Path) -> None:
    done = run(
        sys.executable,
        script,
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="2",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
        OMPI_COMM_WORLD_LOCAL_SIZE="1",
        PMIX_NAMESPACE="n",
    )
    assert (
        "ConfigError: the 2 processes that mpirun has started cannot find each other; give all of them" in done.stderr
    )


def test_detect_launch() -> None:
    assert detect_launch({}) == Launch()
    assert detect_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == Launch()
    over_hosts = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert detect_launch(over_hosts) == Launch("torchrun", 5, 8, 1, single_host=False)
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
    assert detect_launch(slurm | {"SLURM_NNODES": "2"}) == Launch("srun", 3, 4, 1, single_host=False, job="slurm  2")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "variable RANK must be a whole number, but is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "variable LOCAL_RANK must be a whole number, but is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "torchrun's environment gives rank 2 of 2 processes"),
    ],
)
def test_bad_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_launch(environ)


def test_too_many_processes_for_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyrannc.job import process

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(process, "detect_launch", lambda: Launch("mpirun", 6, 8, 2, job="j"))
    with pytest.raises(RaNNCError, match=r"rank 6 is process 2 on its host, where it sees 2 CUDA device\(s\)"):
        process.ensure_process_group()


# Each worker lets go of many tensors, with the interpreter that a rank at its end does not give away by itself.
LATE_WORKERS = """
import sys, torch, torch.distributed as dist
from pyrannc.job import process
group = process.control()
sys.setswitchinterval(1000)
dist.all_reduce_coalesced([torch.ones(1) for _ in range(2000)], group=group)
"""


def test_ends_beside_late_workers_of_gloo(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(LATE_WORKERS)
    assert lines(run(*TORCHRUN, path)) == []
